"""How many of the golden prompts' tokens agree with the reference, in every mode that an engine has."""

from typing import Any

import torch

from benchmarks.figures import figure
from tests.engine.golden import CASES, MODES, Golden, num_tokens, share_agreed

FORCED_TARGET = 0.985
CHUNKS = {"whole": 512, "chunked": 16, "decoded": 1}


def measure() -> list[dict[str, Any]]:
    """Shares: `forced` behind the reference's own tokens; `free` up to each output's first divergence."""
    kinds = (
        ("default", Golden(torch.bfloat16, "auto"), FORCED_TARGET, None),
        ("bf16", Golden(torch.bfloat16, "dtype"), FORCED_TARGET, None),
        ("f32", Golden(torch.float32), 1.0, 1.0),
    )
    return [figure for kind in kinds for figure in _measure(*kind)]


def _measure(
    name: str, golden: Golden, forced_target: float, free_target: float | None
) -> list[dict[str, Any]]:
    figures = []
    for how, chunk in CHUNKS.items():
        share = 1 - len(golden.forced_misses(CASES, chunk)) / num_tokens(CASES)
        figures.append(figure(f"exactness.{name}.forced.{how}", share, "share", "higher", forced_target))
    for mode in MODES:
        share = share_agreed(golden.run(CASES, mode).outputs, CASES)
        figures.append(figure(f"exactness.{name}.free.{mode.name}", share, "share", "higher", free_target))
    return figures
