"""A model whose logits are an exact hash of the prefix, read from the pages through the block table.

Every token of the prefix is looked up in the KV pool, so a wrong table, a lost write or a block shared by
mistake changes the output.
"""

import numpy as np
import torch

from engine.batch import Batch
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
        for s, end in enumerate(batch.context_lens):
            at = np.arange(end)
            prefix = slots[batch.block_tables[s, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE]
            rows = slice(batch.cu_query_lens[s], batch.cu_query_lens[s + 1])
            hashes[rows] = np.array(prefix_hashes(prefix))[batch.positions[rows]]
        wanted = hashes[batch.logit_rows].astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = wanted[:, None] * self._vocab[None] * _MULTIPLIER
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) / (1 << 22))


def prefix_hashes(tokens: np.ndarray) -> list[int]:
    """A 61-bit polynomial hash of every prefix."""
    hashes, value = [], 1
    for token in tokens.astype(int).tolist():
        value = (value * 1_000_003 + token + 7) % ((1 << 61) - 1)
        hashes.append(value)
    return hashes


def small_pool(num_blocks: int) -> KVPool:
    """One float a slot."""
    return KVPool(torch.zeros(1, 2, num_blocks, 1, BLOCK_SIZE, 1))
