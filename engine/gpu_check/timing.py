"""How long work takes on the GPU."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median of several runs, after one that does not count."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return median(times)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
