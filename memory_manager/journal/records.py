"""What a record says, and how it is done again."""

import json
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np

from memory_manager.codec import decode_update, encode_answer
from memory_manager.config import MemoryConfig, TenantLimits
from memory_manager.state import State


class Kind(IntEnum):
    """Update records are encoded by `codec`, snapshots by `snapshot`, all others are JSON."""

    SNAPSHOT = 1
    UPDATE = 2
    REGISTER = 3
    END_EPOCH = 4
    PIN = 5
    UNPIN = 6
    CLEAR = 7
    CONFIGURE = 8


class ReplayDifferenceError(Exception):
    """A record, done again, had another outcome: it was not written by this program, or not for it."""


def encode_facts(facts: Any) -> bytes:
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()


def replay_record(state: State, kind: int, payload: memoryview) -> None:
    """Does again what the record says. Raises ReplayDifferenceError."""
    if kind == Kind.UPDATE:
        record = decode_update(payload)
        answer = state.update(record.request, record.now_us)
        if encode_answer(answer) != record.answer:
            raise ReplayDifferenceError(f"call {record.request.op_seq} of epoch {record.request.epoch}")
        return
    facts = json.loads(bytes(payload))
    match Kind(kind):
        case Kind.REGISTER:
            secret = bytes.fromhex(facts.pop("secret"))
            state.register(secret=secret, **facts)
        case Kind.END_EPOCH:
            state.end_epoch(facts["epoch"])
        case Kind.PIN:
            salt, adapter = facts.pop("namespace")
            tokens = np.array(facts.pop("tokens"), np.int32)
            state.pin(namespace=(salt, adapter), tokens=tokens, **facts)
        case Kind.UNPIN:
            state.unpin(**facts)
        case Kind.CLEAR:
            state.clear(**facts)
        case Kind.CONFIGURE:
            state.configure(config_from_facts(facts, state.config))
        case _:
            raise ReplayDifferenceError(f"a record of kind {kind} in the tail")


def config_to_facts(config: MemoryConfig) -> dict[str, Any]:
    """What of the settings decides outcomes."""
    return {
        "min_wait_blocks": config.min_wait_blocks,
        "eviction": config.eviction,
        "draft_index_tokens": config.draft_index_tokens,
        "default_limits": vars(config.default_limits),
        "tenants": {tenant: vars(limits) for tenant, limits in config.tenants.items()},
    }


def config_from_facts(facts: dict[str, Any], base: MemoryConfig) -> MemoryConfig:
    """`base` with the recorded settings."""
    return replace(
        base,
        min_wait_blocks=facts["min_wait_blocks"],
        eviction=facts["eviction"],
        draft_index_tokens=facts["draft_index_tokens"],
        default_limits=TenantLimits(**facts["default_limits"]),
        tenants={tenant: TenantLimits(**limits) for tenant, limits in facts["tenants"].items()},
    )
