"""Pins: holds on cached prefixes that end by themselves, so that they cannot wedge a pool."""

from collections.abc import Callable
from typing import NamedTuple

from memory_manager.columns import Int32s
from memory_manager.core import prefixes
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.errors import ExhaustedError, NotFoundError
from memory_manager.tables import Namespace, Tables
from memory_manager.views import Pin


class PinEntry(NamedTuple):
    tenant_row: int
    namespace: Namespace
    prefix: prefixes.Prefix
    ttl_ms: int
    expires_at_us: int


class Pins:
    """The pins of one engine's pool."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.entries: dict[int, PinEntry] = {}

    def __contains__(self, pin_id: int) -> bool:
        return pin_id in self.entries

    def add(
        self, pin_id: int, tenant: str, namespace: Namespace, tokens: Int32s, ttl_ms: int, now_us: int
    ) -> Pin:
        """Pins as much of `tokens` as is cached, in whole blocks.

        Raises NotFoundError / NOT_CACHED and ExhaustedError / PIN_CAP.
        """
        prefix = self._tables.find_prefix(namespace, tokens, tokens.size // BLOCK_SIZE)
        if prefix.num_blocks == 0:
            raise NotFoundError("NOT_CACHED", "less than one block of the prefix is cached")
        row = self._tables.tenant_row(tenant)
        limits = self._tables.pool.tenants[row]
        if limits["pinned"] + prefix.num_blocks > limits["pin_cap"]:
            raise ExhaustedError(
                "PIN_CAP",
                f"{prefix.num_blocks} blocks more than {limits['pinned']} pinned ones exceed the cap of"
                f" {limits['pin_cap']}",
            )
        prefixes.pin(self._tables.arrays, row, prefix.node, prefix.num_blocks)
        self.entries[pin_id] = PinEntry(row, namespace, prefix, ttl_ms, now_us + 1000 * ttl_ms)
        return Pin(pin_id, prefix.num_blocks * BLOCK_SIZE)

    def remove(self, pin_id: int) -> None:
        """Raises KeyError when there is no such pin."""
        entry = self.entries.pop(pin_id)
        prefixes.unpin(self._tables.arrays, entry.tenant_row, entry.prefix.node, entry.prefix.num_blocks)

    def remove_where(self, condition: Callable[[Namespace], bool]) -> None:
        for pin_id, entry in list(self.entries.items()):
            if condition(entry.namespace):
                self.remove(pin_id)

    def expired(self, now_us: int) -> list[int]:
        return [pin_id for pin_id, entry in self.entries.items() if entry.expires_at_us <= now_us]

    @property
    def held_nodes(self) -> list[int]:
        return [entry.prefix.node for entry in self.entries.values()]

    @property
    def blocks_by_tenant(self) -> list[tuple[int, int]]:
        """(tenant row, number of blocks) of each pin."""
        return [(entry.tenant_row, entry.prefix.num_blocks) for entry in self.entries.values()]
