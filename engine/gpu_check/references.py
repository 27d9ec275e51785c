"""The kernels' meaning in plain torch, in float32; that of sampling in numpy, in float64."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.sampling import philox_uniform

Tensor = torch.Tensor
PAGE = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """heads [T, H, D]; cos, sin [P, D/2]."""
    first, second = heads.float().chunk(2, -1)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def contiguous(cache: Tensor, blocks: Sequence[int], length: int) -> Tensor:
    """[Hkv, length, D] float32 of a cache [num_blocks, Hkv, 16, D]."""
    return cache[list(blocks)].transpose(0, 1).flatten(1, 2)[:, :length].float()


def attend(q: Tensor, keys: Tensor, values: Tensor, sees: Tensor, scale: float) -> Tensor:
    """q [n, Hq, D], keys and values [Hkv, length, D], sees bool [n, length]; float32 [n, Hq, D]."""
    group = q.shape[1] // keys.shape[0]
    scores = torch.einsum("qhd,hkd->hqk", q.float(), keys.repeat_interleave(group, 0)) * scale
    weights = scores.masked_fill(~sees.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, 0))


def causal(num_queries: int, length: int) -> Tensor:
    """bool [num_queries, length]: the queries are the last of the tokens."""
    return torch.arange(length) <= (length - num_queries + torch.arange(num_queries))[:, None]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    sees: Sequence[Tensor] | None = None,
) -> Tensor:
    rows = torch.split(q, list(query_lens))
    out = []
    for s, (table, length) in enumerate(zip(block_tables, context_lens, strict=True)):
        visible = causal(query_lens[s], length) if sees is None else sees[s]
        blocks = table[: -(-length // PAGE)]
        keys, values = contiguous(k_cache, blocks, length), contiguous(v_cache, blocks, length)
        out.append(attend(rows[s], keys, values, visible, scale))
    return torch.cat(out)


def verify_tree(
    tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]
) -> tuple[list[int], int]:
    """The accepted nodes and the token that follows them."""
    path: list[int] = []
    at = 0
    while True:
        children = [n for n in range(len(tokens)) if parents[n] == at and tokens[n] == targets[at]]
        if not children:
            return path, targets[at]
        at = children[0]
        path.append(at)


def sample(
    logits: npt.NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: tuple[int, int, int],
) -> int:
    """A token of one row: min_p, then top_k, then top_p of what is left; the inverse CDF in order of ids.

    key: seed, choice and position. Of equal weights those with the lowest ids are kept.
    """
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")[: top_k or None]
    mass = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    uniform = philox_uniform(np.uint64(key[0]), key[1], key[2])
    return int(np.searchsorted(np.cumsum(kept), uniform * kept.sum(), side="right"))
