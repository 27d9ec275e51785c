"""Pins: holds on cached prefixes that end by themselves, so that they cannot wedge a pool."""

from collections.abc import Callable
from typing import NamedTuple

from memory_manager.columns import INT32, Int32s, freeze
from memory_manager.core import prefixes
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.errors import ExhaustedError, InvalidRequestError, NotFoundError
from memory_manager.tables import Namespace, Tables
from memory_manager.views import Pin


class _Entry(NamedTuple):
    tenant_row: int
    namespace: Namespace
    prefix: prefixes.Prefix
    expires_at: float  # seconds of the manager's clock


class Pins:
    """The pins of one engine's pool."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._entries: dict[int, _Entry] = {}

    def __contains__(self, pin_id: int) -> bool:
        return pin_id in self._entries

    def add(self, pin_id: int, tenant: str, namespace: Namespace, tokens: Int32s, expires_at: float) -> Pin:
        """Pins as much of `tokens` as is cached, in whole blocks.

        Raises NotFoundError / NOT_CACHED and ExhaustedError / PIN_CAP.
        """
        freeze(tokens, INT32, "tokens")
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
        prefixes.pin(self._tables.handle, row, prefix)
        self._entries[pin_id] = _Entry(row, namespace, prefix, expires_at)
        return Pin(pin_id, prefix.num_blocks * BLOCK_SIZE)

    def remove(self, pin_id: int) -> None:
        """Does nothing when the pin has ended already."""
        entry = self._entries.pop(pin_id, None)
        if entry is not None:
            prefixes.unpin(self._tables.handle, entry.tenant_row, entry.prefix)

    def remove_where(self, condition: Callable[[Namespace], bool]) -> None:
        for pin_id, entry in list(self._entries.items()):
            if condition(entry.namespace):
                self.remove(pin_id)

    def expired(self, now: float) -> list[int]:
        return [pin_id for pin_id, entry in self._entries.items() if entry.expires_at <= now]

    @property
    def held_nodes(self) -> list[int]:
        return [entry.prefix.node for entry in self._entries.values()]

    @property
    def blocks_by_tenant(self) -> list[tuple[int, int]]:
        """(tenant row, number of blocks) of each pin."""
        return [(entry.tenant_row, entry.prefix.num_blocks) for entry in self._entries.values()]


def check_ttl(ttl_ms: int) -> None:
    if ttl_ms <= 0:
        raise InvalidRequestError("BAD_TTL", f"ttl_ms must be > 0, not {ttl_ms}")
