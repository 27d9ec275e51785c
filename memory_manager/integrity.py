"""Proves every invariant of a pool from scratch: counts are recomputed, every link is followed."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memory_manager.core.handle import address_table
from memory_manager.core.layout import (
    BLOCK_SIZE,
    DETACHED,
    FENCED,
    FREE,
    NONE,
    PENDING,
    PRIVATE,
    QUARANTINED,
    READY,
    Array,
    Pool,
    aligned_zeros,
)
from memory_manager.core.probe import block_like, hash_of_edge, path_below, row_of
from memory_manager.engine_pool import EnginePool


class Subject(NamedTuple):
    """What is examined: a pool and what points into it from outside."""

    epoch: int
    pool: Pool
    arrays: Array  # address table of the pool
    tenant_rows: list[int]
    pinned_nodes: list[int]
    pinned_blocks: list[tuple[int, int]]  # (tenant row, number of blocks) of each pin


def subject_of(engine: EnginePool) -> Subject:
    return Subject(
        engine.epoch,
        engine.tables.pool,
        engine.tables.arrays,
        sorted(engine.tables.tenants.rows.values()),
        engine.pins.held_nodes,
        engine.pins.blocks_by_tenant,
    )


def copy_of(engine: EnginePool) -> Subject:
    """To be examined by another thread, while the pool goes on."""
    copied = Pool(*(_aligned_copy(array) for array in engine.tables.pool))
    return subject_of(engine)._replace(pool=copied, arrays=address_table(copied))


def _aligned_copy(array: Array) -> Array:
    copied = aligned_zeros(array.size, array.dtype)
    copied[:] = array
    return copied


def check_pool(subject: Subject) -> list[str]:
    """What is violated, in words; nothing when all is well. Assumes nothing but the arrays' sizes."""
    pool, arrays = subject.pool, subject.arrays
    try:
        return [
            *_check_states(pool),
            *_check_sequences(pool, arrays),
            *_check_trie(pool, subject.pinned_nodes),
            *_check_edges(pool, arrays),
            *_check_order(pool, subject.tenant_rows),
            *_check_tenants(pool, subject.pinned_blocks),
            *_check_waiters(pool),
        ]
    except (IndexError, RecursionError) as broken_link:
        return [f"a link leads nowhere: {broken_link}"]


def in_states(pool: Pool, *states: int) -> set[int]:
    return set(np.flatnonzero(np.isin(pool.state, states)).tolist())


def live_rows(pool: Pool) -> list[int]:
    return [int(row) for row in np.flatnonzero(pool.sequences["sequence_id"])]


def private_chain(pool: Pool, row: int) -> list[int]:
    """A sequence's private blocks in order; stops at a loop."""
    chain: list[int] = []
    block = int(pool.sequences["first"][row])
    while block != NONE and len(chain) <= pool.state.size:
        chain.append(block)
        block = int(pool.next[block])
    return chain


def path_to(pool: Pool, node: int) -> list[int]:
    """The blocks from a root down to a node; stops at a loop."""
    path: list[int] = []
    while node < pool.nodes.size and len(path) <= pool.nodes.size:
        path.append(node)
        node = int(pool.nodes["parent"][node])
    return path[::-1]


def _check_states(pool: Pool) -> Iterator[str]:
    """Every block is in exactly one place, and the counters say how many are where."""
    counters = pool.counters[0]
    num_free, num_fenced = int(counters["num_free"]), int(counters["num_fenced"])
    size = pool.state.size
    free = pool.free_list[:num_free].tolist()
    fenced = pool.fence[:num_fenced].tolist()
    if len(set(free)) < len(free) or set(free) != in_states(pool, FREE):
        yield "the free stack does not hold every FREE block once"
    if len(set(fenced)) < len(fenced) or set(fenced) != in_states(pool, FENCED):
        yield "the fence does not hold every FENCED block once"
    if any(pool.nodes["fence_step"][block] <= counters["completed_step"] for block in fenced):
        yield "a block is fenced although its step has completed"
    expected = {
        "num_free": in_states(pool, FREE),
        "num_private": in_states(pool, PRIVATE, PENDING),
        "num_ready": in_states(pool, READY, DETACHED),
        "num_fenced": in_states(pool, FENCED),
        "num_quarantined": in_states(pool, QUARANTINED),
    }
    for name, blocks in expected.items():
        if counters[name] != len(blocks):
            yield f"{name} is {counters[name]}, counted {len(blocks)}"
    if sum(map(len, expected.values())) != size:
        yield "a block is in no known state"


def _check_sequences(pool: Pool, arrays: Array) -> Iterator[str]:
    rows = live_rows(pool)
    num_sequences = int(pool.counters["num_sequences"][0])
    num_spare = pool.sequences.size - num_sequences
    if set(rows) | set(pool.spare_rows[:num_spare].tolist()) != set(range(pool.sequences.size)):
        yield "the sequence rows are not either in use or spare"
    if len(rows) != num_sequences:
        yield f"num_sequences is {num_sequences}, counted {len(rows)}"
    chained: list[int] = []
    for row in rows:
        chained += private_chain(pool, row)
        for violation in _check_sequence(pool, arrays, row):
            yield f"sequence {pool.sequences['sequence_id'][row]}: {violation}"
    if sorted(chained) != sorted(in_states(pool, PRIVATE, PENDING)):
        yield "the private blocks are not in one page table each"


def _check_sequence(pool: Pool, arrays: Array, row: int) -> Iterator[str]:
    sequence = pool.sequences[row]
    num_tokens, num_sealed = int(sequence["num_tokens"]), int(sequence["num_sealed"])
    chain = private_chain(pool, row)
    path = path_to(pool, int(sequence["node"]))
    if row_of(arrays, int(sequence["sequence_id"])) != row:
        yield "not found in the index"
    if len(path) != num_sealed or len(path) + len(chain) != sequence["num_blocks"]:
        yield "num_sealed or num_blocks does not fit the page table"
    if not num_sealed * BLOCK_SIZE <= sequence["num_written"] <= num_tokens:
        yield "num_written out of range"
    if sequence["num_inherited"] > num_tokens:
        yield "num_inherited out of range"
    if num_tokens > sequence["num_blocks"] * BLOCK_SIZE:
        yield "more tokens than slots"
    if sequence["seals"] and sequence["num_written"] // BLOCK_SIZE != num_sealed:
        yield "a written block is not sealed"
    if not set(path) <= in_states(pool, READY, DETACHED):
        yield "a shared block is not READY"
    if [int(pool.prev[block]) for block in chain] != ([NONE, *chain])[: len(chain)]:
        yield "backward links differ from forward ones"
    if sequence["last"] != (chain[-1] if chain else NONE):
        yield "`last` is not the last private block"
    cursor = num_tokens // BLOCK_SIZE - num_sealed
    if sequence["cursor"] != (chain[cursor] if cursor < len(chain) else NONE):
        yield "`cursor` is not the block of the next token"
    if sequence["path"] != path_hash(pool, arrays, path, int(sequence["root"])):
        yield "wrong path hash"
    states = [int(pool.state[block]) for block in chain]
    if PENDING in states[states.count(PENDING) :]:
        yield "its pending blocks are not the first private ones"


def path_hash(pool: Pool, arrays: Array, path: list[int], root: int) -> np.uint64:
    hashed = np.uint64(pool.roots["path"][root])
    for block in path:
        hashed = np.uint64(path_below(arrays, hashed, block))
    return hashed


def _check_trie(pool: Pool, pinned: list[int]) -> Iterator[str]:
    """Counts of children and references, recomputed from parents and holders."""
    size = pool.nodes.size
    nodes = in_states(pool, READY, DETACHED)
    rows = live_rows(pool)
    refs = Counter([int(pool.sequences["node"][row]) for row in rows] + pinned)
    children: Counter[int] = Counter()
    for block in sorted(nodes, key=lambda block: -int(pool.nodes["depth"][block])):
        parent = int(pool.nodes["parent"][block])
        depth = 1 if parent >= size else int(pool.nodes["depth"][parent]) + 1
        children[parent] += 1
        if refs[block]:
            refs[parent] += 1
        if parent < size and parent not in nodes:
            yield f"block {block} hangs below block {parent}, which is not in the trie"
        if pool.nodes["depth"][block] != depth:
            yield f"block {block} has depth {pool.nodes['depth'][block]}, expected {depth}"
    for block in nodes:
        if pool.nodes["refs"][block] != refs[block]:
            yield f"block {block} has refs {pool.nodes['refs'][block]}, counted {refs[block]}"
        if pool.nodes["children"][block] != children[block]:
            yield f"block {block} has children {pool.nodes['children'][block]}, counted {children[block]}"
        if pool.state[block] == DETACHED and not refs[block]:
            yield f"block {block} is detached and held by nobody"
    num_in_root = Counter(int(pool.sequences["root"][row]) for row in rows)
    for root in range(pool.roots.size):
        if pool.roots["children"][root] != children[size + root]:
            yield f"root {root} has children {pool.roots['children'][root]}, counted {children[size + root]}"
        if pool.roots["sequences"][root] != num_in_root[root]:
            yield f"root {root} has {pool.roots['sequences'][root]} sequences, counted {num_in_root[root]}"


def _check_edges(pool: Pool, arrays: Array) -> Iterator[str]:
    size = pool.nodes.size
    indexed = in_states(pool, READY, PENDING)
    linked = [int(block) for block in pool.edges["block"] if block != NONE]
    if sorted(linked) != sorted(indexed):
        yield "the edges do not lead to every READY and PENDING block once"
    for block in indexed:
        path = path_to(pool, block)
        parent = int(pool.nodes["parent"][block])
        root = int(pool.nodes["parent"][path[0]]) - size
        hashed = hash_of_edge(path_hash(pool, arrays, path, root))
        if parent < size and parent not in indexed:
            yield f"block {block} is indexed below block {parent}, which is not"
        if pool.nodes["edge_hash"][block] != hashed:
            yield f"block {block} has a wrong hash"
        if block_like(arrays, block) != block:
            yield f"block {block} is not the one that its tokens lead to"


def _check_order(pool: Pool, tenants: list[int]) -> Iterator[str]:
    """Eviction orders: well linked, sorted by age, with every block that can be evicted."""
    listed: set[int] = set()
    for tenant in tenants:
        block, before, age = int(pool.tenants["oldest"][tenant]), NONE, -1
        while block != NONE:
            if block in listed or pool.owner[block] != tenant or pool.state[block] != READY:
                yield f"block {block} does not belong in the eviction order of tenant {tenant}"
                return
            if pool.prev[block] != before or pool.nodes["last_used"][block] < age:
                yield f"block {block} is misplaced in the eviction order of tenant {tenant}"
            listed.add(block)
            age = int(pool.nodes["last_used"][block])
            block, before = int(pool.next[block]), block
        if pool.tenants["newest"][tenant] != before:
            yield f"the eviction order of tenant {tenant} does not end at its newest block"
    leaves = (pool.state == READY) & (pool.nodes["refs"] == 0) & (pool.nodes["children"] == 0)
    for block in set(np.flatnonzero(leaves).tolist()) - listed:
        yield f"block {block} can be evicted but is in no eviction order"


def _check_tenants(pool: Pool, pins: list[tuple[int, int]]) -> Iterator[str]:
    shared = np.isin(pool.state, (READY, DETACHED))
    private = Counter[int]()
    for row in live_rows(pool):
        private[int(pool.sequences["tenant"][row])] += len(private_chain(pool, row))
    evictable = (pool.state == READY) & (pool.nodes["refs"] == 0)
    sequences = Counter(int(pool.sequences["tenant"][row]) for row in live_rows(pool))
    for tenant in range(pool.tenants.size):
        counted = {
            "charged": private[tenant] + int((shared & (pool.owner == tenant)).sum()),
            "evictable": int((evictable & (pool.owner == tenant)).sum()),
            "sequences": sequences[tenant],
            "pinned": sum(num_blocks for row, num_blocks in pins if row == tenant),
        }
        for name, expected in counted.items():
            if pool.tenants[name][tenant] != expected:
                yield f"tenant {tenant}: {name} is {pool.tenants[name][tenant]}, counted {expected}"
    if pool.counters["num_evictable"][0] != evictable.sum():
        yield f"num_evictable is {pool.counters['num_evictable'][0]}, counted {evictable.sum()}"


def _check_waiters(pool: Pool) -> Iterator[str]:
    for waiter in pool.waiters[: int(pool.counters["num_waiting"][0])]:
        if not waiter["woken"] and pool.state[waiter["block"]] != PENDING:
            yield f"sequence {waiter['sequence_id']} waits for a block that nobody computes"
