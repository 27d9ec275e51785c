"""`nexuskv replay`: what a journal's requests would have hit with other pools and under another policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from memory_manager import MemoryConfig
from memory_manager.journal.file import DamagedRecordError
from memory_manager.replay import miss_ratio_curve, recorded_num_blocks, replay
from services.config import ReplayConfig
from services.startup import CommandError

_POLICIES: dict[str, Literal["lru", "fifo"]] = {"lru": "lru", "fifo": "fifo"}
# Pools of the curve, as parts of the one asked for.
_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)


async def run_replay(config: ReplayConfig, say: Callable[[str], None]) -> None:
    """Prints hit rate, evictions and a miss-ratio curve, and draws the curve. Raises CommandError."""
    path = _journal_file(Path(config.journal).expanduser())
    rules = MemoryConfig(eviction=_POLICIES[config.policy])
    try:
        num_blocks = config.blocks or recorded_num_blocks(path)
        result = replay(path, num_blocks, rules)
        if result.hit_rate is None:
            raise CommandError(f"{path} has no request since its snapshot")
        sizes = sorted({max(1, round(part * num_blocks)) for part in _PARTS})
        curve = miss_ratio_curve(path, sizes, rules)
    except (OSError, DamagedRecordError) as error:
        raise CommandError(f"{path} cannot be replayed: {error}") from error
    say(f"{path.name}: {result.num_acquires} requests, {result.num_query_tokens} prompt tokens")
    say(
        f"{num_blocks} blocks, {config.policy}: hit rate {result.hit_rate:.3f},"
        f" {result.num_evictions} evictions,"
        f" {result.num_refused} refused, {result.num_preempted} preempted"
    )
    say(f"{'blocks':>10} {'miss ratio':>10}")
    for size, miss_ratio in curve:
        say(f"{size:>10} {miss_ratio:>10.3f}")
    _draw(curve, config.policy, Path(config.plot))
    say(f"drawn in {config.plot}")


def _journal_file(path: Path) -> Path:
    newest = max(path.glob("journal-*.log"), default=None) if path.is_dir() else path
    if newest is None or not newest.is_file():
        raise CommandError(f"{path} is neither a journal file nor a directory with one")
    return newest


def _draw(curve: list[tuple[int, float]], policy: str, path: Path) -> None:
    # Takes a second to import, and nothing else needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True), marker="o", label=policy)
    axes.set(xscale="log", xlabel="blocks", ylabel="miss ratio", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CommandError(f"--plot={path}: {error}") from error
