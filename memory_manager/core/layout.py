"""The state of one engine's pool: every array, its type and what it means.

A full, shareable block is a node of the trie. Node ids: 0 … N-1 are the blocks of the pool, N + r is the
root of namespace r. Parent links and holds use node ids.

Links. `prev` and `next` chain a PRIVATE block into its sequence's page table (logical order) and a READY
block into its owner's eviction order (oldest first). So a page table is: the path from the root to the
sequence's deepest node, then its chain of private blocks.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK_SIZE = 16
NONE = -1

# Block states. PENDING is a PRIVATE block that already has an edge, so that others can wait for it;
# DETACHED is a READY block that has lost its edge and lives only as long as its holders.
FREE, PRIVATE, READY, FENCED, QUARANTINED, PENDING, DETACHED = range(7)

# Fence of a replaced duplicate: steps launched before the engine has the answer may still read it, so it
# waits for the launched_step that the next call will name.
NEXT_CALL = np.iinfo(np.int64).max

NO_QUOTA = np.iinfo(np.int32).max

# What the trie knows of a block.
NODE = np.dtype(
    [
        ("last_used", np.int64),  # tick at which the last direct hold was dropped
        ("fence_step", np.int64),  # last launched step that may touch the block
        ("parent", np.int32),  # node id; set while PENDING, READY or DETACHED
        ("refs", np.int32),  # direct holds + children with refs > 0
        ("children", np.int32),  # READY or DETACHED children
        ("depth", np.int32),  # 1 below a root
        ("edge_hash", np.uint32),
    ],
    align=True,
)

EDGE = np.dtype([("edge_hash", np.uint32), ("block", np.int32)], align=True)

ROOT = np.dtype([("path", np.uint64), ("children", np.int32), ("sequences", np.int32)], align=True)

SEQUENCE = np.dtype(
    [
        ("sequence_id", np.int64),
        ("path", np.uint64),  # hash of all tokens down to `node`
        ("mark", np.int64),  # call that last named the sequence, see checks.py
        ("num_tokens", np.int32),  # final tokens
        ("num_written", np.int32),  # of these, with K/V in the pool
        ("num_sealed", np.int32),  # shared blocks: the path from the root down to `node`
        ("num_blocks", np.int32),  # shared and private
        ("num_inherited", np.int32),  # tokens at its start that stand in another sequence's text
        ("node", np.int32),  # deepest shared node, or the root: the one node the sequence holds
        ("first", np.int32),  # first private block
        ("last", np.int32),  # last private block
        ("cursor", np.int32),  # private block that takes the next token, NONE when all are full
        ("tenant", np.int32),
        ("root", np.int32),
        ("checked_tokens", np.int32),  # num_tokens after the advance being checked
        ("checked_blocks", np.int32),  # num_blocks after the truncate being checked
        ("seals", np.bool_),  # False once its namespace was cleared
    ],
    align=True,
)

ROW = np.dtype([("sequence_id", np.int64), ("row", np.int32)], align=True)

TENANT = np.dtype(
    [
        ("num_evictions", np.int64),
        ("quota", np.int32),  # NO_QUOTA without one
        ("floor", np.int32),
        ("pin_cap", np.int32),
        ("charged", np.int32),  # its PRIVATE and READY blocks
        ("evictable", np.int32),  # of these, READY without holders
        ("pinned", np.int32),  # blocks of its pins, each pin counted
        ("sequences", np.int32),
        ("oldest", np.int32),  # ends of its eviction order
        ("newest", np.int32),
    ],
    align=True,
)

WAITER = np.dtype(
    [("sequence_id", np.int64), ("block", np.int32), ("num_blocks", np.int32), ("woken", np.bool_)],
    align=True,
)

GHOST = np.dtype(
    [
        ("left_at_us", np.int64),
        ("edge_hash", np.uint32),
        ("depth", np.int32),  # 0: no ghost
        ("tenant", np.int32),  # for whose sake it was evicted
        ("cause", np.int32),
    ],
    align=True,
)

CHANGE = np.dtype([("block", np.int32), ("kind", np.int32)], align=True)

# What is read after every call, and the time of the call.
HEADLINE = ("num_free", "num_fenced", "num_evictable", "num_woken", "num_changes", "now_us")

_OTHER_COUNTERS = (
    "num_private num_ready num_quarantined num_sequences num_waiting"
    " launched_step completed_step tick calls fifo remembers"
    " num_evictions num_query_tokens num_hit_tokens num_forks num_coalesced_tokens"
    " num_truncated_blocks num_replaced_blocks"
).split()

COUNTERS = np.dtype([(name, np.int64) for name in (*HEADLINE, *_OTHER_COUNTERS)], align=True)


class Pool(NamedTuple):
    """One engine's pool. N blocks; the other sizes grow with use. Element types are in POOL_DTYPES."""

    tokens: Array  # [16 N], the tokens in each block's slots
    nodes: Array  # [N]
    state: Array  # [N]
    owner: Array  # [N], tenant charged for a READY block; a PRIVATE one is its sequence's
    prev: Array  # [N]
    next: Array  # [N]
    free_list: Array  # [N], a stack of num_free blocks
    fence: Array  # [N], num_fenced blocks, oldest first
    edges: Array  # [2 N], open addressing, linear probing; block NONE = empty
    roots: Array  # [R]
    sequences: Array  # [S], sequence_id 0 = unused
    spare_rows: Array  # [S], a stack of the S - num_sequences unused rows
    row_index: Array  # [4 S], open addressing by sequence id; 0 = empty
    tenants: Array  # [T]
    waiters: Array  # [W], oldest first
    ghosts: Array  # [G], buckets chosen by edge hash; G is a power of two
    changes: Array  # [2 N], or empty while nobody watches
    secret: Array  # [16], keys of the token hash
    counters: Array  # [1]


POOL_DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "nodes": NODE,
    "state": np.dtype(np.uint8),
    "owner": np.dtype(np.int32),
    "prev": np.dtype(np.int32),
    "next": np.dtype(np.int32),
    "free_list": np.dtype(np.int32),
    "fence": np.dtype(np.int32),
    "edges": EDGE,
    "roots": ROOT,
    "sequences": SEQUENCE,
    "spare_rows": np.dtype(np.int32),
    "row_index": ROW,
    "tenants": TENANT,
    "waiters": WAITER,
    "ghosts": GHOST,
    "changes": CHANGE,
    "secret": np.dtype(np.uint32),
    "counters": COUNTERS,
}


def aligned_zeros(size: int, dtype: Any) -> Array:
    """Zeros that start on a cache line, so that a row of 64 bytes is one line."""
    num_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype)


def new_pool(num_blocks: int, secret: npt.NDArray[np.uint32]) -> Pool:
    """An all-free pool. Block 0 is handed out first."""
    sizes = {
        "tokens": BLOCK_SIZE * num_blocks,
        "edges": 2 * num_blocks,
        "roots": 4,
        "sequences": 16,
        "spare_rows": 16,
        "row_index": 64,
        "tenants": 4,
        "waiters": 16,
        "ghosts": _num_ghosts(num_blocks),
        "changes": 0,
        "secret": BLOCK_SIZE,
        "counters": 1,
    }
    pool = Pool(
        **{name: aligned_zeros(sizes.get(name, num_blocks), dtype) for name, dtype in POOL_DTYPES.items()}
    )
    for links in (pool.owner, pool.prev, pool.next):
        links[:] = NONE
    pool.edges["block"] = NONE
    pool.free_list[:] = np.arange(num_blocks - 1, -1, -1)
    pool.spare_rows[:] = np.arange(15, -1, -1)
    pool.secret[:] = secret
    pool.counters["num_free"] = num_blocks
    return pool


def _num_ghosts(num_blocks: int) -> int:
    """An eighth to a quarter of the blocks, so that ghosts cost little."""
    return max(64, 1 << (num_blocks // 8).bit_length())
