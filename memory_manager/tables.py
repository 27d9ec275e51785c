"""The arrays of one engine's pool, their growth, and the names of their rows."""

import hashlib
from collections.abc import Callable

import numpy as np

from memory_manager.columns import Int32s
from memory_manager.config import MemoryConfig, TenantLimits
from memory_manager.core import prefixes
from memory_manager.core.growth import doubled, grow_sequences
from memory_manager.core.handle import address_table
from memory_manager.core.layout import CHANGE, HEADLINE, NO_QUOTA, NONE, Array, Pool, new_pool
from memory_manager.directory import Directory, K

Namespace = tuple[str, str]  # (salt, adapter); the model fingerprint is the engine's


class Tables:
    def __init__(self, num_blocks: int, secret: bytes, config: MemoryConfig) -> None:
        self._config = config
        self.adopt(new_pool(num_blocks, np.frombuffer(secret, np.uint32).copy()))
        self.tenants: Directory[str] = Directory(self.pool.tenants.size)
        self.namespaces: Directory[Namespace] = Directory(self.pool.roots.size)
        self.configure(config)

    def adopt(self, pool: Pool) -> None:
        """Goes on with these arrays."""
        self.pool = pool
        self.arrays = address_table(pool)
        self.current = pool, self.arrays  # for other threads: the table is valid while they keep the pool
        self.headline = pool.counters.view(np.int64)[: len(HEADLINE)]

    def make_rows(self, num_new: int) -> None:
        """Sees to rows for so many new sequences, waiting or not."""
        counters = self.pool.counters[0]
        while counters["num_sequences"] + num_new > self.pool.sequences.size:
            self.adopt(grow_sequences(self.pool))
        while counters["num_waiting"] + num_new > self.pool.waiters.size:
            self.adopt(self.pool._replace(waiters=doubled(self.pool.waiters)))

    def log_changes(self) -> None:
        """From now on, what enters and leaves the cache is logged."""
        self.adopt(self.pool._replace(changes=np.zeros(2 * self.pool.state.size, CHANGE)))

    def limits(self, tenant: str) -> TenantLimits:
        return self._config.tenants.get(tenant, self._config.default_limits)

    def tenant_row(self, tenant: str) -> int:
        row = self.tenants.rows.get(tenant)
        if row is not None:
            return row
        row = self._new_row(self.tenants, tenant, "tenants", self._tenant_is_idle)
        entry = self.pool.tenants[row]
        entry["num_evictions"] = 0
        entry["oldest"] = entry["newest"] = NONE
        self.pool.ghosts["tenant"][self.pool.ghosts["tenant"] == row] = NONE
        self._set_limits(tenant, row)
        return row

    def configure(self, config: MemoryConfig) -> None:
        """From now on, these are the rules."""
        self._config = config
        self.pool.counters["fifo"] = config.eviction == "fifo"
        self.pool.counters["remembers"] = config.draft_index_tokens > 0
        for tenant, row in self.tenants.rows.items():
            self._set_limits(tenant, row)

    def _set_limits(self, tenant: str, row: int) -> None:
        num_blocks = self.pool.state.size
        limits = self.limits(tenant)
        entry = self.pool.tenants[row]
        entry["quota"] = NO_QUOTA if limits.quota is None else limits.quota
        entry["floor"] = limits.floor
        entry["pin_cap"] = num_blocks // 4 if limits.pin_cap is None else limits.pin_cap

    def tenant_of_row(self, row: int) -> str | None:
        return self.tenants.names.get(row)

    def find_prefix(self, namespace: Namespace, tokens: Int32s, limit: int) -> prefixes.Prefix:
        """The longest cached prefix of `tokens`, at most `limit` blocks."""
        root = self.namespaces.rows.get(namespace)
        if root is None or limit <= 0:
            return prefixes.Prefix(0, NONE)
        tokens.setflags(write=False)
        return prefixes.Prefix(*prefixes.find_prefix(self.arrays, root, tokens, limit))

    def root_row(self, namespace: Namespace) -> int:
        row = self.namespaces.rows.get(namespace)
        if row is not None:
            return row
        row = self._new_row(self.namespaces, namespace, "roots", self._root_is_idle)
        self.pool.roots[row]["path"] = self._root_path(namespace)
        return row

    def _root_path(self, namespace: Namespace) -> int:
        """A secret hash of the namespace; lengths keep its fields apart."""
        salt, adapter = (field.encode() for field in namespace)
        text = len(salt).to_bytes(8, "little") + salt + adapter
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self.pool.secret.tobytes()).digest())

    def _tenant_is_idle(self, row: int) -> bool:
        entry = self.pool.tenants[row]
        return bool(entry["charged"] == 0 and entry["sequences"] == 0 and entry["pinned"] == 0)

    def _root_is_idle(self, row: int) -> bool:
        entry = self.pool.roots[row]
        return bool(entry["children"] == 0 and entry["sequences"] == 0)

    def _new_row(self, directory: Directory[K], name: K, table: str, is_idle: Callable[[int], bool]) -> int:
        """A row for a new name; when all are taken, idle ones are reused or the table is doubled."""
        row = directory.add(name)
        while row is None:
            rows: Array = getattr(self.pool, table)
            if not directory.sweep(is_idle):
                directory.extend(2 * rows.size)
                self.adopt(self.pool._replace(**{table: doubled(rows)}))
            row = directory.add(name)
        return row
