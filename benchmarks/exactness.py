"""How many of the golden prompts' tokens agree with the reference, in every mode that an engine has."""

from typing import Any

import torch

from benchmarks.figures import figure
from tests.engine.golden import CASES, MODES, Golden, num_tokens, share_agreed

FORCED_TARGET = 0.985
CHUNKS = {"whole": 512, "chunked": 16, "decoded": 1}


def measure() -> list[dict[str, Any]]:
    """Shares: `forced` behind the reference's own tokens; `free` up to each output's first divergence."""
    return [*_measure("bf16", torch.bfloat16, FORCED_TARGET, None), *_measure("f32", torch.float32, 1.0, 1.0)]


def _measure(
    name: str, dtype: torch.dtype, forced_target: float, free_target: float | None
) -> list[dict[str, Any]]:
    golden = Golden(dtype)
    figures = []
    for how, chunk in CHUNKS.items():
        share = 1 - len(golden.forced_misses(CASES, chunk)) / num_tokens(CASES)
        figures.append(figure(f"exactness.{name}.forced.{how}", share, "share", "higher", forced_target))
    for mode in MODES:
        share = share_agreed(golden.run(CASES, mode).outputs, CASES)
        figures.append(figure(f"exactness.{name}.free.{mode.name}", share, "share", "higher", free_target))
    return figures
