"""Ghosts: what is remembered of blocks that left the cache, to explain later misses.

A bounded table of small buckets; a ghost takes the place of the oldest in its bucket.
"""

from enum import IntEnum
from typing import Any

from memory_manager.core.hashing import edge_hash
from memory_manager.core.jit import inner
from memory_manager.core.layout import BLOCK_SIZE, NONE, Array, Pool

_BUCKET_SIZE = 4


class EvictionCause(IntEnum):
    """Numbers as in the proto, PURGED apart."""

    OWN_PRESSURE = 1
    SHARED_PRESSURE = 2
    QUOTA = 3
    PURGED = 4


class MissReason(IntEnum):
    """Numbers as in the proto."""

    NONE = 1
    NEVER_SEEN = 2
    EVICTED = 3
    SHORTER_THAN_BLOCK = 4
    PENDING = 5
    PURGED = 6
    NOT_ASKED = 7


@inner
def remember(pool: Pool, block: int, cause: int, tenant: int) -> None:
    """The block leaves the cache now, for the sake of `tenant`."""
    node = pool.nodes[block]
    bucket = _bucket(pool, node.edge_hash)
    slot = bucket
    for i in range(bucket, bucket + _BUCKET_SIZE):
        if pool.ghosts[i].edge_hash == node.edge_hash and pool.ghosts[i].depth == node.depth:
            slot = i
            break
        if pool.ghosts[i].left_at_us < pool.ghosts[slot].left_at_us:
            slot = i
    ghost = pool.ghosts[slot]
    ghost.edge_hash = node.edge_hash
    ghost.depth = node.depth
    ghost.left_at_us = pool.counters[0].now_us
    ghost.cause = cause
    ghost.tenant = tenant


@inner
def find_ghost(pool: Pool, hashed: Any, depth: int) -> int:
    """The slot of a block that would lie at this depth with this edge hash, or NONE."""
    bucket = _bucket(pool, hashed)
    for slot in range(bucket, bucket + _BUCKET_SIZE):
        if pool.ghosts[slot].edge_hash == hashed and pool.ghosts[slot].depth == depth:
            return slot
    return NONE


@inner
def _bucket(pool: Pool, hashed: Any) -> Any:
    """The first of a bucket's slots."""
    return hashed & (pool.ghosts.size - _BUCKET_SIZE)


@inner
def explain_miss(
    pool: Pool, num_tokens: int, paths: Array, match_prefix: bool, num_cached: int, num_pending: int
) -> tuple[int, int, int]:
    """(MissReason, slot of the first missed block's ghost or NONE, blocks after it that would have hit)."""
    limit = (num_tokens - 1) // BLOCK_SIZE
    if limit == 0:
        return MissReason.SHORTER_THAN_BLOCK.value, NONE, 0
    if not match_prefix:
        return MissReason.NOT_ASKED.value, NONE, 0
    if num_cached == limit:
        return MissReason.NONE.value, NONE, 0
    if num_pending > 0:
        return MissReason.PENDING.value, NONE, num_pending - 1
    slot = find_ghost(pool, edge_hash(paths[num_cached]), num_cached + 1)
    if slot == NONE:
        return MissReason.NEVER_SEEN.value, NONE, 0
    num_more = 0
    while (
        num_cached + num_more + 1 < limit
        and find_ghost(pool, edge_hash(paths[num_cached + num_more + 1]), num_cached + num_more + 2) != NONE
    ):
        num_more += 1
    was_purged = pool.ghosts[slot].cause == EvictionCause.PURGED.value
    return MissReason.PURGED.value if was_purged else MissReason.EVICTED.value, slot, num_more
