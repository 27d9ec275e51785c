"""A model whose logits are an exact hash of the prefix, read from the pages through the block table.

Every token of the prefix is looked up in the KV pool, so a wrong table, a lost write or a block shared by
mistake changes the output.
"""

from collections.abc import Iterable

import numpy as np
import torch

from engine.batch import Batch
from engine.kernels.tree import causal
from engine.kv_pool import BLOCK_SIZE, KVPool

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class HashModel:
    def __init__(self, vocab_size: int = 32) -> None:
        self._vocab = np.arange(1, vocab_size + 1, dtype=np.uint64)

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Writes each token id as its K; a row's logits are made from the hash of its prefix."""
        slots = kv.keys(0).view(-1).numpy()  # one float a slot
        slots[batch.slot_mapping] = batch.token_ids
        hashes = np.empty(batch.num_tokens, np.int64)
        tree = batch.tree or causal(batch.cu_query_lens, batch.context_lens)
        for s, end in enumerate(batch.context_lens):
            at = np.arange(end)
            context = slots[batch.block_tables[s, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE]
            known = prefix_hashes(context)
            for row in range(batch.cu_query_lens[s], batch.cu_query_lens[s + 1]):
                visible, ancestors = tree.visible[row], int(tree.ancestors[row])
                nodes = [token for i, token in enumerate(context[visible:]) if ancestors >> i & 1]
                assert batch.positions[row] == visible + len(nodes) - 1, "a node's position is its depth"
                hashes[row] = prefix_hashes(nodes, known[visible - 1])[-1] if nodes else known[visible - 1]
        wanted = hashes[batch.logit_rows].astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = wanted[:, None] * self._vocab[None] * _MULTIPLIER
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) / (1 << 22))


def prefix_hashes(tokens: Iterable[float], value: int = 1) -> list[int]:
    """A 61-bit polynomial hash of every prefix, behind a prefix whose hash is `value`."""
    hashes = []
    for token in tokens:
        value = (value * 1_000_003 + int(token) + 7) % ((1 << 61) - 1)
        hashes.append(value)
    return hashes


def small_pool(num_blocks: int) -> KVPool:
    """One float a slot."""
    return KVPool(torch.zeros(1, 2, num_blocks, 1, BLOCK_SIZE, 1))
