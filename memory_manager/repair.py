"""Mending a pool whose accounts drifted: what is certain stays, what is doubtful is quarantined.

Certain are the page tables of its sequences and pins. A block that is not where its state says, or whose
tokens do not lead to it, is taken out of use, or at least out of the index when somebody holds it.
Everything that can be derived (lists, edges, counts, eviction orders, accounts) is then derived anew.
"""

from collections import Counter

import numpy as np

from memory_manager.core.layout import (
    DETACHED,
    FENCED,
    FREE,
    NONE,
    PENDING,
    PRIVATE,
    QUARANTINED,
    READY,
    Pool,
)
from memory_manager.core.probe import hash_of_edge, path_below
from memory_manager.core.rebuild import rebuild_edges
from memory_manager.integrity import Subject, in_states, live_rows, path_hash, path_to, private_chain


def repair_pool(subject: Subject) -> list[int]:
    """Answers the blocks put in quarantine. The caller checks whether mending was enough."""
    pool = subject.pool
    before = in_states(pool, QUARANTINED)
    _stop_announcing(pool)
    used = _used_blocks(pool, subject.pinned_nodes)
    _settle_states(pool, used)
    _take_doubtful_nodes_out(subject, used)
    _derive_lists(pool)
    _derive_counts(pool, subject.pinned_nodes)
    rebuild_edges(subject.arrays)
    _derive_orders(pool, subject.tenant_rows)
    _derive_accounts(pool, subject)
    return sorted(in_states(pool, QUARANTINED) - before)


def _stop_announcing(pool: Pool) -> None:
    """Nobody waits for anybody any more; who waited asks again."""
    pool.state[pool.state == PENDING] = PRIVATE
    waiters = pool.waiters[: int(pool.counters["num_waiting"][0])]
    waiters["woken"] = True
    pool.counters["num_woken"] = waiters.size


def _used_blocks(pool: Pool, pinned: list[int]) -> dict[int, int]:
    """Each block in a page table, with the state that it has there."""
    used: dict[int, int] = {}
    for node in pinned:
        used.update(dict.fromkeys(path_to(pool, node), READY))
    for row in live_rows(pool):
        used.update(dict.fromkeys(path_to(pool, int(pool.sequences["node"][row])), READY))
        used.update(dict.fromkeys(private_chain(pool, row), PRIVATE))
    return used


def _settle_states(pool: Pool, used: dict[int, int]) -> None:
    """Every block is where its state says, once, or in quarantine."""
    free = Counter(pool.free_list[: int(pool.counters["num_free"][0])].tolist())
    fenced = Counter(pool.fence[: int(pool.counters["num_fenced"][0])].tolist())
    proper_places = {FREE: (1, 0), FENCED: (0, 1), READY: (0, 0)}
    for block, state in enumerate(pool.state.tolist()):
        if block in used:
            if used[block] == PRIVATE:
                pool.state[block] = PRIVATE
            elif state != READY:
                pool.state[block] = DETACHED
        elif proper_places.get(state) != (free[block], fenced[block]):
            pool.state[block] = QUARANTINED


def _take_doubtful_nodes_out(subject: Subject, used: dict[int, int]) -> None:
    """A node stays indexed when its parent does and its tokens give its hash."""
    pool = subject.pool
    size = pool.nodes.size
    hashes: dict[int, np.uint64] = {size + i: path for i, path in enumerate(pool.roots["path"])}
    for block in sorted(in_states(pool, READY), key=lambda block: len(path_to(pool, block))):
        above = hashes.get(int(pool.nodes["parent"][block]))
        if above is not None:
            path = np.uint64(path_below(subject.arrays, above, block))
            if hash_of_edge(path) == pool.nodes["edge_hash"][block]:
                hashes[block] = path
        if block not in hashes:
            pool.state[block] = DETACHED if block in used else QUARANTINED
    for row in live_rows(pool):
        sequence = pool.sequences[row]
        path_blocks = path_to(pool, int(sequence["node"]))
        sequence["path"] = path_hash(pool, subject.arrays, path_blocks, int(sequence["root"]))
        if any(pool.state[block] == DETACHED for block in path_blocks):
            sequence["seals"] = False


def _derive_lists(pool: Pool) -> None:
    for blocks, state in ((pool.free_list, FREE), (pool.fence, FENCED)):
        members = np.flatnonzero(pool.state == state)[::-1]
        blocks[: members.size] = members


def _derive_counts(pool: Pool, pinned: list[int]) -> None:
    size = pool.nodes.size
    nodes = in_states(pool, READY, DETACHED)
    depths = {block: len(path_to(pool, block)) for block in nodes}
    refs = Counter([int(pool.sequences["node"][row]) for row in live_rows(pool)] + pinned)
    children: Counter[int] = Counter()
    for block in sorted(nodes, key=depths.__getitem__, reverse=True):
        parent = int(pool.nodes["parent"][block])
        children[parent] += 1
        refs[parent] += refs[block] > 0
        pool.nodes["depth"][block] = depths[block]
        pool.nodes["refs"][block], pool.nodes["children"][block] = refs[block], children[block]
    pool.roots["children"] = [children[size + root] for root in range(pool.roots.size)]


def _derive_orders(pool: Pool, tenants: list[int]) -> None:
    """Only what can be evicted now need be in an order."""
    shared = ~np.isin(pool.state, (PRIVATE, PENDING))
    pool.prev[shared] = pool.next[shared] = NONE
    leaves = (pool.state == READY) & (pool.nodes["refs"] == 0) & (pool.nodes["children"] == 0)
    for tenant in tenants:
        mine = np.flatnonzero(leaves & (pool.owner == tenant))
        mine = mine[np.argsort(pool.nodes["last_used"][mine], kind="stable")]
        pool.next[mine[:-1]], pool.prev[mine[1:]] = mine[1:], mine[:-1]
        pool.tenants["oldest"][tenant] = mine[0] if mine.size else NONE
        pool.tenants["newest"][tenant] = mine[-1] if mine.size else NONE


def _derive_accounts(pool: Pool, subject: Subject) -> None:
    rows = live_rows(pool)
    shared = np.isin(pool.state, (READY, DETACHED))
    evictable = (pool.state == READY) & (pool.nodes["refs"] == 0)
    for tenant in range(pool.tenants.size):
        mine = [row for row in rows if pool.sequences["tenant"][row] == tenant]
        num_private = sum(len(private_chain(pool, row)) for row in mine)
        account = pool.tenants[tenant]
        account["charged"] = num_private + np.sum(shared & (pool.owner == tenant))
        account["evictable"] = np.sum(evictable & (pool.owner == tenant))
        account["sequences"] = len(mine)
        account["pinned"] = sum(number for row, number in subject.pinned_blocks if row == tenant)
    in_root = Counter(pool.sequences["root"][rows].tolist())
    pool.roots["sequences"] = [in_root[root] for root in range(pool.roots.size)]
    counters = pool.counters
    counters["num_free"] = np.sum(pool.state == FREE)
    counters["num_fenced"] = np.sum(pool.state == FENCED)
    counters["num_private"] = np.sum(pool.state == PRIVATE)
    counters["num_ready"] = np.sum(shared)
    counters["num_quarantined"] = np.sum(pool.state == QUARANTINED)
    counters["num_evictable"] = np.sum(evictable)
