"""A log of what entered and left the cache during one call, kept only while somebody watches."""

from memory_manager.core.jit import inner
from memory_manager.core.layout import Pool

STORED, REMOVED = 1, 2


@inner
def log_change(pool: Pool, block: int, kind: int) -> None:
    if pool.changes.size > 0:
        change = pool.changes[pool.counters[0].num_changes]
        change.block = block
        change.kind = kind
        pool.counters[0].num_changes += 1
