"""The memory manager's figures."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from benchmarks import memory_decoding as decoding
from benchmarks import memory_workloads as workloads
from benchmarks.figures import figure, table
from benchmarks.memory_rpc import advance_rpc_us
from memory_manager import MemoryConfig, MemoryManager

_RUST = "NexusKV-Engine (Rust), its own machine"


class Figure(NamedTuple):
    name: str
    measure: Callable[[], float]
    unit: str
    better: Literal["higher", "lower"]
    target: float | None
    peer: str | None = None
    peer_value: float | None = None


FIGURES = [
    Figure("memory.alloc_free", workloads.alloc_free, "blocks/s", "higher", 600e6),
    Figure("memory.match_64k", lambda: workloads.match_prompts(1 << 16), "blocks/s", "higher", 15e6),
    Figure("memory.match_1m", lambda: workloads.match_prompts(1 << 20), "blocks/s", "higher", 8e6),
    Figure("memory.lookup_us", workloads.lookup_us, "us", "lower", None),
    Figure("memory.seal", workloads.seal, "blocks/s", "higher", 5e6),
    Figure("memory.evict", workloads.evict, "blocks/s", "higher", 5e6),
    Figure("memory.rollback", workloads.rollback, "1/s", "higher", 10e6),
    Figure("memory.advance_core_us", decoding.advance_core_us, "us", "lower", 20),
    Figure("memory.advance_rpc_us", advance_rpc_us, "us", "lower", 1000),
    Figure("memory.advance_drafts_us", decoding.advance_drafts_us, "us", "lower", None),
    Figure("memory.bytes_per_block", workloads.bytes_per_block, "bytes", "lower", 160),
    Figure("memory.recovery_ops", decoding.recovery_ops, "1/s", "higher", 1e6),
    Figure("memory.waste_share", decoding.waste_share, "share", "lower", 0.03),
    Figure("memory.inspect_p99_ratio", decoding.inspect_p99_ratio, "ratio", "lower", 1.1),
    Figure("seed.allocator_65536", workloads.seed_allocator, "blocks/s", "higher", 52.6e6, _RUST, 52.6e6),
    Figure("seed.radix_100k", workloads.seed_radix, "1/s", "higher", 1.18e6, _RUST, 1.18e6),
]


def measure() -> list[dict[str, Any]]:
    """One entry per figure, as in bench.json."""
    MemoryManager(MemoryConfig()).warm_up()
    results = []
    for f in FIGURES:
        result = figure(f.name, f.measure(), f.unit, f.better, f.target)
        if f.peer is not None:
            result |= {"peer": f.peer, "peer_value": f.peer_value}
        results.append(result)
    return results


if __name__ == "__main__":
    print(table(measure()))
