"""The path hash: a keyed 64-bit hash of all tokens from the root down to a block.

A block's 16 tokens are digested by the NH family (a sum of 8 products of keyed token pairs; Black et al.,
UMAC, 1999), the digest is chained to the parent's path hash. The keys are secret, so nobody can craft
prompts that collide. A collision costs a probe, never a wrong hit: probes compare parent and tokens.
"""

import numpy as np

from memory_manager.core.indices import index
from memory_manager.core.jit import inner
from memory_manager.core.layout import BLOCK_SIZE, Array, Pool

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINISHER = np.uint64(0xBF58476D1CE4E5B9)


@inner
def extend_path(path: np.uint64, tokens: Array, start: int, secret: Array) -> np.uint64:
    """The path hash of the block with `tokens[start : start + 16]` below the node with hash `path`."""
    digest = np.uint64(0)
    first, one = index(start), np.uint64(1)
    for i in range(index(0), index(BLOCK_SIZE), index(2)):
        left = np.uint32(np.uint32(tokens[first + i]) + secret[i])
        right = np.uint32(np.uint32(tokens[first + i + one]) + secret[i + one])
        digest += np.uint64(left) * np.uint64(right)
    mixed = (path ^ digest) * _MULTIPLIER
    mixed ^= mixed >> np.uint64(32)
    mixed *= _FINISHER
    return mixed ^ (mixed >> np.uint64(29))


@inner
def chain_paths(pool: Pool, root: int, tokens: Array, paths: Array) -> None:
    """Fills `paths` (uint64[D]) with the path hashes of the first D blocks of `tokens` below a root."""
    path = pool.roots[root].path
    for i in range(paths.size):
        path = extend_path(path, tokens, i * BLOCK_SIZE, pool.secret)
        paths[i] = path


@inner
def edge_hash(path: np.uint64) -> np.uint32:
    return np.uint32(path >> np.uint64(32))
