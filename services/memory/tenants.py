"""Reads what each tenant may hold."""

import tomllib
from dataclasses import fields
from pathlib import Path

from memory_manager import TenantLimits
from memory_manager.manager import MAX_POOL_BLOCKS
from services.config import ConfigError


def read_tenant_limits(path: str) -> dict[str, TenantLimits]:
    """A TOML file with a table per tenant; no path, no limits. Raises ConfigError naming the key."""
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"tenant limits {path} cannot be read: {error}") from error
    return {tenant: _limits(path, tenant, table) for tenant, table in tables.items()}


def _limits(path: str, tenant: str, table: object) -> TenantLimits:
    allowed = [field.name for field in fields(TenantLimits)]
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {tenant} must be a table with {', '.join(allowed)}")
    for key, value in table.items():
        if key not in allowed:
            raise ConfigError(f"{path}: [{tenant}] has no {key}; allowed are {', '.join(allowed)}")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_POOL_BLOCKS:
            raise ConfigError(
                f"{path}: [{tenant}] {key} = {value!r} must be an integer from 0 to {MAX_POOL_BLOCKS}"
            )
    return TenantLimits(**table)
