"""The whole state in one record: its facts as JSON, the arrays of every pool as they are, all texts."""

import hashlib
import json
import struct
from typing import Any

import numpy as np

from memory_manager.codec import Reader, decode_answer, encode_answer
from memory_manager.config import MemoryConfig
from memory_manager.core.drafts import texts_of
from memory_manager.core.layout import POOL_DTYPES, Array, Pool, aligned_zeros
from memory_manager.core.prefixes import Prefix
from memory_manager.directory import Directory
from memory_manager.draft_index import TextNamespace
from memory_manager.engine_pool import EnginePool, LastCall
from memory_manager.errors import MemoryManagerError
from memory_manager.journal.records import config_from_facts, config_to_facts, encode_facts
from memory_manager.pins import PinEntry
from memory_manager.state import State

# Pools are stored as they are, so only a program with the same layout can read them.
_LAYOUT = hashlib.blake2b(repr(POOL_DTYPES).encode(), digest_size=8).hexdigest()
_HEAD = struct.Struct("<q")  # bytes of the facts


def encode_state(state: State) -> bytes:
    texts = [(namespace, ring, texts_of(ring)) for namespace, ring in state.drafts.rings.items()]
    facts = {
        "layout": _LAYOUT,
        "config": config_to_facts(state.config),
        "last_epoch": state.last_epoch,
        "last_pin_id": state.last_pin_id,
        "engines": [_engine_facts(engine) for engine in state.engines.values()],
        "texts": [(*namespace, ring.tokens.size, ended.size) for namespace, ring, ended in texts],
    }
    encoded = encode_facts(facts)
    parts = [_HEAD.pack(len(encoded)), encoded, _padding(len(encoded))]
    for engine in state.engines.values():
        for array in engine.tables.pool:
            parts += [array.tobytes(), _padding(array.nbytes)]
    parts += [ended.tobytes() for _, _, ended in texts]
    return b"".join(parts)


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % 8)


def _engine_facts(engine: EnginePool) -> dict[str, Any]:
    last = engine.last_call
    return {
        "engine_id": engine.engine_id,
        "epoch": engine.epoch,
        "num_blocks": engine.num_blocks,
        "model_fingerprint": engine.model_fingerprint,
        "secret": engine.tables.pool.secret.tobytes().hex(),
        "sizes": [array.size for array in engine.tables.pool],
        "tenants": _directory_facts(engine.tables.tenants),
        "namespaces": _directory_facts(engine.tables.namespaces),
        "pins": [[pin_id, *entry[:-1]] for pin_id, entry in engine.pins.entries.items()],
        "last_op_seq": last.op_seq,
        "last_digest": last.digest.hex(),
        "last_answer": encode_answer(last.answer).hex() if last.answer is not None else None,
    }


def _directory_facts(directory: Directory[Any]) -> dict[str, Any]:
    return {"rows": list(directory.rows.items()), "spare": directory.spare}


def decode_state(payload: memoryview, config: MemoryConfig, now_us: int) -> State:
    """The state as it was, with the recorded settings; times to live start again at `now_us`.

    Raises MemoryManagerError / JOURNAL_INCOMPATIBLE.
    """
    facts, offset = _read_facts(payload)
    if facts["layout"] != _LAYOUT:
        raise MemoryManagerError("JOURNAL_INCOMPATIBLE", "written by another version")
    state = State(config_from_facts(facts["config"], config))
    state.last_epoch, state.last_pin_id = facts["last_epoch"], facts["last_pin_id"]
    for engine_facts in facts["engines"]:
        arrays: list[Array] = []
        for dtype, size in zip(POOL_DTYPES.values(), engine_facts["sizes"], strict=True):
            array = aligned_zeros(size, dtype)
            array[:] = np.frombuffer(payload, dtype, size, offset)
            arrays.append(array)
            offset += array.nbytes + -array.nbytes % 8
        pool = Pool(*arrays)
        # Nobody watches yet.
        pool.counters["num_changes"] = 0
        engine = _engine_from(engine_facts, pool._replace(changes=pool.changes[:0]), state, now_us)
        state.engines[engine.epoch] = engine
    for *namespace, size, num_tokens in facts["texts"]:
        ended = np.frombuffer(payload, np.int32, num_tokens, offset).copy()
        state.drafts.restore(TextNamespace(*namespace), size, ended)
        offset += ended.nbytes
    return state


def pool_sizes(payload: memoryview) -> list[int]:
    """The number of blocks of every pool in a snapshot."""
    facts, _ = _read_facts(payload)
    return [engine["num_blocks"] for engine in facts["engines"]]


def _read_facts(payload: memoryview) -> tuple[dict[str, Any], int]:
    """The facts, and where the arrays begin."""
    (num_bytes,) = _HEAD.unpack_from(payload)
    end = _HEAD.size + num_bytes
    return json.loads(bytes(payload[_HEAD.size : end])), end + -end % 8


def _engine_from(facts: dict[str, Any], pool: Pool, state: State, now_us: int) -> EnginePool:
    engine = EnginePool(
        facts["engine_id"],
        facts["epoch"],
        facts["num_blocks"],
        facts["model_fingerprint"],
        bytes.fromhex(facts["secret"]),
        state.config,
        state.drafts,
    )
    engine.tables.adopt(pool)
    engine.tables.tenants.restore(dict(facts["tenants"]["rows"]), facts["tenants"]["spare"])
    namespaces = {(salt, adapter): row for (salt, adapter), row in facts["namespaces"]["rows"]}
    engine.tables.namespaces.restore(namespaces, facts["namespaces"]["spare"])
    for pin_id, tenant_row, namespace, prefix, ttl_ms in facts["pins"]:
        engine.pins.entries[pin_id] = PinEntry(
            tenant_row, tuple(namespace), Prefix(*prefix), ttl_ms, now_us + 1000 * ttl_ms
        )
    answer = facts["last_answer"]
    engine.last_call = LastCall(
        facts["last_op_seq"],
        bytes.fromhex(facts["last_digest"]),
        decode_answer(Reader(memoryview(bytes.fromhex(answer)))) if answer is not None else None,
    )
    return engine
