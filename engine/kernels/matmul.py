"""Matrix products with packed weights: out = x @ w.T, summed in float32.

A packed weight is one array, whose dtype says what it holds:

    uint32  [num_panels, K / 2, PANEL]   two bfloat16 of one output in a word, the even k in the low half
    float32 [num_panels, K, PANEL]

A panel holds `PANEL` outputs (rows of w), the last one filled up with zeros.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.jit import NUM_THREADS, device, inlined, parallel_kernel, run_team
from engine.kernels.team import claim, claim_next, new_team, wait
from engine.kernels.tile import MAX_TILE_ROWS, MAX_TWO_PANEL_ROWS, PANEL, multiply_rows

PackedWeight = npt.NDArray[np.uint32] | npt.NDArray[np.float32]

# A task's rows and weights stay in the level-2 cache.
_ROWS_PER_TASK = 16 * MAX_TILE_ROWS
_MAX_PANELS_PER_TASK = 8
_TASKS_PER_THREAD = 8


def pack_weight(w: npt.NDArray[Any]) -> PackedWeight:
    """Packs w [N, K]: uint16 (bfloat16 bits, K even) or float32."""
    num_outputs, depth = w.shape
    num_panels = -(-num_outputs // PANEL)
    padded = np.zeros((num_panels * PANEL, depth), w.dtype)
    padded[:num_outputs] = w
    if w.dtype == np.float32:
        return np.ascontiguousarray(padded.reshape(num_panels, PANEL, depth).transpose(0, 2, 1))
    if w.dtype != np.uint16 or depth % 2:
        raise ValueError(
            f"cannot pack a weight of {w.dtype} {w.shape}: float32, or uint16 with an even depth"
        )
    pairs = padded.view(np.uint32).reshape(num_panels, PANEL, depth // 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1))


@inlined
def _multiply_block(x, panels, out, row_begin, row_end, panel_begin, panel_end, spill):  # type: ignore[no-untyped-def]
    """out[row_begin:row_end, columns of the panels]."""
    num_outputs, depth = out.shape[1], panels.shape[1]
    panel_stride = depth * PANEL
    num_rows = row_end - row_begin
    step = 2 if num_rows <= MAX_TWO_PANEL_ROWS else 1
    x_row = (row_begin * x.shape[1], x.shape[1])
    for panel in range(panel_begin, panel_end, step):
        count = min(step, panel_end - panel)
        column = panel * PANEL
        fits = column + count * PANEL <= num_outputs
        target = out if fits else spill
        out_row = (row_begin * num_outputs + column, num_outputs) if fits else (0, spill.shape[1])
        w_panel = (panel * panel_stride, PANEL, panel_stride)
        multiply_rows(x, x_row, num_rows, panels, w_panel, depth, target, out_row, count, 0)
        if not fits:
            _copy_columns(spill, out, row_begin, num_rows, column)


@inlined
def _copy_columns(source, out, row, rows, column):  # type: ignore[no-untyped-def]
    """out[row : row + rows, column:] = the beginning of source."""
    for r in range(rows):
        for index in range(out.shape[1] - column):
            out[row + r, column + index] = source[r, index]


@device
def multiply_phase(team, phase, x, panels, out):  # type: ignore[no-untyped-def]
    """out [M, N] = x [M, K] @ packed weight, shared by the team."""
    num_rows, num_panels = x.shape[0], panels.shape[0]
    row_tasks = -(-num_rows // _ROWS_PER_TASK)
    panels_per_task = num_panels * row_tasks // (NUM_THREADS * _TASKS_PER_THREAD)
    panels_per_task = max(2, min(_MAX_PANELS_PER_TASK, panels_per_task // 2 * 2))
    panel_tasks = -(-num_panels // panels_per_task)
    spill = np.empty((_ROWS_PER_TASK, 2 * PANEL), np.float32)
    num_tasks = row_tasks * panel_tasks
    task = claim(team, phase)
    while task < num_tasks:
        row_begin = task // panel_tasks * _ROWS_PER_TASK
        panel_begin = task % panel_tasks * panels_per_task
        row_end = min(num_rows, row_begin + _ROWS_PER_TASK)
        panel_end = min(num_panels, panel_begin + panels_per_task)
        _multiply_block(x, panels, out, row_begin, row_end, panel_begin, panel_end, spill)
        task = claim_next(team, phase)
    wait(team, phase, num_tasks)


@parallel_kernel
def matmul(x, w, out):  # type: ignore[no-untyped-def]
    """out [M, N] = x [M, K] @ w.T; x and out float32, w from `pack_weight`."""
    run_team(multiply_phase, (new_team(1), 0, x, w, out))
