"""Acquire: a new sequence gets its page table, shared prefix first."""

from typing import NamedTuple

import numpy as np

from memory_manager.core.blocks import append_blocks
from memory_manager.core.eviction import reserve
from memory_manager.core.ghosts import explain_miss
from memory_manager.core.handle import open_pool
from memory_manager.core.hashing import chain_paths
from memory_manager.core.holds import hold, take_back_hold
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import BLOCK_SIZE, NONE, Array, Pool
from memory_manager.core.rows import take_row
from memory_manager.core.trie import announce, count_ready, match
from memory_manager.core.waiting import add_waiter, remove_waiter

GRANTED, WAIT, SHORT = 1, 2, 3


class AcquireOutcome(NamedTuple):
    status: int
    num_cached_blocks: int
    num_pending_blocks: int
    num_needed: int  # blocks that must be free or evictable for the acquire to be granted
    miss_reason: int  # why not more was cached, see ghosts.py; GRANTED only
    ghost: int
    num_more_blocks: int


@kernel
def acquire(
    arrays: Array,
    sequence_id: int,
    tenant: int,
    root: int,
    tokens: Array,  # int32[n]
    match_prefix: bool,
    min_wait_blocks: int,
    table: Array,  # out, int32[ceil(n / 16)], whole when granted
) -> AcquireOutcome:
    """All or nothing. At least the last token is left to compute, so a whole prompt is never matched."""
    pool: Pool = open_pool(arrays)
    num_tokens = tokens.size
    paths = np.empty(num_tokens // BLOCK_SIZE, np.uint64)
    chain_paths(pool, root, tokens, paths)
    limit = (num_tokens - 1) // BLOCK_SIZE if match_prefix else 0
    num_matched = match(pool, root, tokens, paths, limit, table)
    num_cached = count_ready(pool, table, num_matched)
    num_pending = num_matched - num_cached
    if pool.counters[0].num_waiting > 0:
        remove_waiter(pool, sequence_id)
    if num_pending >= min_wait_blocks:
        add_waiter(pool, sequence_id, table[num_matched - 1], num_pending)
        return AcquireOutcome(WAIT, num_cached, num_pending, 0, 0, NONE, 0)
    node = table[num_cached - 1] if num_cached > 0 else pool.nodes.size + root
    num_fresh = table.size - num_cached
    num_needed = num_fresh + pool.counters[0].num_evictable
    hold(pool, node)  # so that making room does not evict what was just matched
    num_needed -= pool.counters[0].num_evictable
    if reserve(pool, tenant, num_fresh, False) < num_fresh:
        take_back_hold(pool, node)
        return AcquireOutcome(SHORT, num_cached, num_pending, num_needed, 0, NONE, 0)
    row = take_row(pool, sequence_id, tenant, root)
    sequence = pool.sequences[row]
    sequence.node = node
    if num_cached > 0:
        sequence.path = paths[num_cached - 1]
    sequence.num_sealed = sequence.num_blocks = num_cached
    sequence.num_written = sequence.num_inherited = num_cached * BLOCK_SIZE
    append_blocks(pool, row, num_fresh, table, num_cached)
    _write_tokens(pool, row, tokens)
    announce(pool, row, paths)
    pool.counters[0].num_query_tokens += num_tokens
    pool.counters[0].num_hit_tokens += num_cached * BLOCK_SIZE
    reason, ghost, num_more = explain_miss(pool, num_tokens, paths, match_prefix, num_cached, num_pending)
    return AcquireOutcome(GRANTED, num_cached, num_pending, num_needed, reason, ghost, num_more)


@inner
def _write_tokens(pool: Pool, row: int, tokens: Array) -> None:
    sequence = pool.sequences[row]
    block = sequence.first
    for start in range(sequence.num_written, tokens.size, BLOCK_SIZE):
        for i in range(start, min(start + BLOCK_SIZE, tokens.size)):
            pool.tokens[block * BLOCK_SIZE + i - start] = tokens[i]
        block = pool.next[block]
    sequence.num_tokens = tokens.size
    sequence.cursor = sequence.last if tokens.size % BLOCK_SIZE != 0 else NONE
