"""Cold-prefix coalescing: acquires that wait for blocks another sequence is computing right now."""

from memory_manager.core.handle import open_pool
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import BLOCK_SIZE, Array, Pool


@inner
def add_waiter(pool: Pool, sequence_id: int, block: int, num_blocks: int) -> None:
    """The sequence waits for `block`, the deepest of the `num_blocks` pending ones it could share."""
    waiter = pool.waiters[pool.counters[0].num_waiting]
    waiter.sequence_id = sequence_id
    waiter.block = block
    waiter.num_blocks = num_blocks
    waiter.woken = False
    pool.counters[0].num_waiting += 1


@inner
def remove_waiter(pool: Pool, sequence_id: int) -> None:
    """The sequence waits no more, if it did."""
    counters = pool.counters
    num_kept = 0
    for i in range(counters[0].num_waiting):
        if pool.waiters[i].sequence_id != sequence_id:
            pool.waiters[num_kept] = pool.waiters[i]
            num_kept += 1
        elif pool.waiters[i].woken:
            counters[0].num_woken -= 1
    counters[0].num_waiting = num_kept


@inner
def wake_waiters(pool: Pool, block: int, was_sealed: bool) -> None:
    """The block was sealed, or will not be: whoever waits for it acquires again."""
    counters = pool.counters
    for i in range(counters[0].num_waiting):
        waiter = pool.waiters[i]
        if waiter.block == block and not waiter.woken:
            waiter.woken = True
            counters[0].num_woken += 1
            if was_sealed:
                counters[0].num_coalesced_tokens += waiter.num_blocks * BLOCK_SIZE


@kernel
def take_woken(arrays: Array, out: Array) -> None:
    """Moves the woken sequences' ids to `out`, longest waiting first."""
    pool: Pool = open_pool(arrays)
    counters = pool.counters
    num_kept = num_woken = 0
    for i in range(counters[0].num_waiting):
        if pool.waiters[i].woken:
            out[num_woken] = pool.waiters[i].sequence_id
            num_woken += 1
        else:
            pool.waiters[num_kept] = pool.waiters[i]
            num_kept += 1
    counters[0].num_waiting = num_kept
    counters[0].num_woken = 0
