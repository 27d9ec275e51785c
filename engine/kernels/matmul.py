# mypy: allow-untyped-defs, allow-untyped-calls
"""Matrix products with packed weights: out = x @ w.T, summed in float32.

A packed weight is one array, whose dtype says what it holds:

    uint32  [num_panels, K / 2, PANEL]   two bfloat16 of one output in a word, the even k in the low half
    float32 [num_panels, K, PANEL]
    others  [num_panels, K / 32, ...]    numbers of 4 or 8 bits and their scales, see quantised.py

A panel holds `PANEL` outputs (rows of w), the last one filled up with zeros. The rows of x are float32. A
product with quantised weights quantises them too; where the processor multiplies pairs of bfloat16
(AVX512_BF16), it does so if they are few, else it rounds them to bfloat16, as one with bfloat16 weights does.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from engine.kernels.int8_amx import multiply_panel_in_registers
from engine.kernels.jit import (
    NUM_THREADS,
    borrowed,
    by_type,
    device,
    inlined,
    keep,
    parallel_kernel,
    run_team,
)
from engine.kernels.pairs import multiplies_pairs, multiply_pairs, narrow
from engine.kernels.quantised import (
    PackedInt4Weight,
    PackedInt8Weight,
    format_of,
    is_quantised,
    new_quantised_rows,
    quantise_rows,
)
from engine.kernels.quantised_tile import multiply_quantised_panel
from engine.kernels.quantised_wide import multiply_wide_panel, narrow_wide_rows, new_wide_operand
from engine.kernels.simd import HAS_AMX, LANES, Float32
from engine.kernels.team import Team, claim, finish, new_counters, wait
from engine.kernels.tile import HAS_BFLOAT16_DOT, MAX_TWO_PANEL_ROWS, PANEL, multiply_rows
from engine.kernels.vector_function import exp2

PackedWeight = npt.NDArray[np.uint32] | npt.NDArray[np.float32] | PackedInt8Weight | PackedInt4Weight

_HALF = PANEL // 2
_LOG2_E = np.float32(1.4426950408889634)
# A task's rows and weights stay in the level-2 cache.
_MAX_ROWS_PER_TASK = 512 if HAS_AMX else 16 * LANES
_MAX_PANELS_PER_TASK = 8
_TASKS_PER_THREAD = 8
# Rows of a task up to which quantised weights meet quantised rows of 8, and of 16 bits; more rows pay for
# widening the weights. The matrix registers take 8-bit numbers only.
_MAX_QUANTISED_ROWS, _MAX_ROWS_OF_16_BITS = (16, 8) if HAS_BFLOAT16_DOT else (1 << 30, 1 << 30)
_MAX_ROWS_IN_REGISTERS = 48


def pack_weight(w: npt.NDArray[Any]) -> npt.NDArray[np.uint32] | Float32:
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


def pair_gate_up(w: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of w [2 I, K], gates first, in the order that `multiply_silu_phase` wants before they are packed:
    half a panel of gates, then their ups; filled up with zeros to whole panels."""
    size = len(w) // 2
    padded = np.zeros((2, -(-size // _HALF) * _HALF, w.shape[1]), w.dtype)
    padded[:, :size] = w.reshape(2, size, -1)
    halves = padded.reshape(2, -1, _HALF, w.shape[1])
    return np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(-1, w.shape[1])


def max_quantised_rows(dtype: types.Type) -> int:
    """For packed weights of this numba dtype."""
    if _multiplies_in_registers(dtype):
        return _MAX_ROWS_IN_REGISTERS
    return _MAX_QUANTISED_ROWS if format_of(dtype).row_bits == 8 else _MAX_ROWS_OF_16_BITS


def _multiplies_in_registers(dtype: types.Type) -> bool:
    return HAS_AMX and dtype == types.int8


@by_type
def _has_many_rows(num_rows, panels):
    limit = max_quantised_rows(panels.dtype)
    return lambda num_rows, panels: num_rows > limit


@by_type
def _new_operand(x, panels):
    """Room for a task's rows in the form that the weights are multiplied with."""
    if is_quantised(panels.dtype):

        def both(x, panels):
            num_rows, depth = min(_MAX_ROWS_PER_TASK, x.shape[0]), x.shape[1]
            return new_quantised_rows(num_rows, depth, panels), new_wide_operand(num_rows, depth)

        return both
    if multiplies_pairs(panels.dtype):
        return lambda x, panels: np.empty((min(_MAX_ROWS_PER_TASK, x.shape[0]), panels.shape[1]), np.uint32)
    return lambda x, panels: x


@by_type
def _prepare_operand(x, panels, row_begin, row_end, operand):
    if is_quantised(panels.dtype):

        def quantise(x, panels, row_begin, row_end, operand):
            rows, wide = operand
            if _has_many_rows(row_end - row_begin, panels):
                narrow_wide_rows(x, row_begin, row_end, wide)
            else:
                quantise_rows(x, row_begin, row_end, rows)

        return quantise
    if multiplies_pairs(panels.dtype):

        def narrow_rows(x, panels, row_begin, row_end, operand):
            narrow(x, row_begin * x.shape[1], operand, 0, (row_end - row_begin) * x.shape[1])

        return narrow_rows
    return lambda x, panels, row_begin, row_end, operand: None


@by_type
def _panels_at_once(num_rows, panels):
    if is_quantised(panels.dtype):
        return lambda num_rows, panels: 1
    return lambda num_rows, panels: 2 if num_rows <= MAX_TWO_PANEL_ROWS else 1


@by_type
def _multiply_panels(x, row_begin, num_rows, operand, panels, panel, count, out, out_row):
    """out_row: flat index of the first result, stride of rows."""
    if is_quantised(panels.dtype):
        in_registers = _multiplies_in_registers(panels.dtype)
        multiply_few = multiply_panel_in_registers if in_registers else multiply_quantised_panel

        def multiply_quantised(x, row_begin, num_rows, operand, panels, panel, count, out, out_row):
            rows, wide = operand
            at, stride = out_row
            if _has_many_rows(num_rows, panels):
                multiply_wide_panel(wide, num_rows, panels, panel, out, at, stride)
            else:
                multiply_few(rows, num_rows, panels, panel, out, at, stride)

        return multiply_quantised

    def multiply(x, row_begin, num_rows, operand, panels, panel, count, out, out_row):
        depth, width = panels.shape[1], operand.shape[1]
        w_panel = (panel * depth * PANEL, PANEL, depth * PANEL)
        x_row = (row_begin * width, width)
        multiply_rows(operand, x_row, num_rows, panels, w_panel, depth, out, out_row, count, 0)

    def multiply_narrow(x, row_begin, num_rows, operand, panels, panel, count, out, out_row):
        depth = panels.shape[1]
        w_panel = (panel * depth * PANEL, PANEL, depth * PANEL)
        multiply_pairs(operand, (0, depth), num_rows, panels, w_panel, depth, out, out_row, count, 0)

    return multiply_narrow if multiplies_pairs(panels.dtype) else multiply


@inlined
def _activate(spill, num_rows, out, row_begin, column):
    """One panel's gates and ups become a half panel of the result."""
    for row in range(num_rows):
        for index in range(min(_HALF, out.shape[1] - column)):
            gate = spill[row, index]
            weight = np.float32(1.0) / (np.float32(1.0) + exp2(-gate * _LOG2_E))
            out[row_begin + row, column + index] = gate * weight * spill[row, _HALF + index]


@inlined
def _multiply_task(x, operand, panels, out, row_begin, row_end, panel_begin, panel_end, spill):
    """out[row_begin:row_end, columns of the panels]."""
    num_outputs, num_rows = out.shape[1], row_end - row_begin
    step = _panels_at_once(num_rows, panels)
    for panel in range(panel_begin, panel_end, step):
        count = min(step, panel_end - panel)
        column = panel * PANEL
        fits = column + count * PANEL <= num_outputs
        target = out if fits else spill
        out_row = (row_begin * num_outputs + column, num_outputs) if fits else (0, spill.shape[1])
        _multiply_panels(x, row_begin, num_rows, operand, panels, panel, count, target, out_row)
        if not fits:
            for row in range(num_rows):
                for index in range(num_outputs - column):
                    out[row_begin + row, column + index] = spill[row, index]


@inlined
def _multiply_silu_task(x, operand, panels, out, row_begin, row_end, panel_begin, panel_end, spill):
    num_rows = row_end - row_begin
    for panel in range(panel_begin, panel_end):
        _multiply_panels(x, row_begin, num_rows, operand, panels, panel, 1, spill, (0, spill.shape[1]))
        _activate(spill, num_rows, out, row_begin, panel * _HALF)


@inlined
def _multiply_tasks(team, phase, x, panels, out, with_silu):
    num_rows, num_panels = x.shape[0], panels.shape[0]
    row_tasks = -(-num_rows // _MAX_ROWS_PER_TASK)
    rows_per_task = -(-num_rows // max(1, row_tasks))
    panels_per_task = num_panels * row_tasks // (NUM_THREADS * _TASKS_PER_THREAD)
    step = _panels_at_once(num_rows, panels)
    panels_per_task = max(step, min(_MAX_PANELS_PER_TASK, panels_per_task // step * step))
    panel_tasks = -(-num_panels // panels_per_task)
    own = np.empty((min(_MAX_ROWS_PER_TASK, num_rows), 2 * PANEL), np.float32), _new_operand(x, panels)
    spill, operand = borrowed(own)
    prepared = -1
    num_tasks = row_tasks * panel_tasks
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        row_begin = task // panel_tasks * rows_per_task
        panel_begin = task % panel_tasks * panels_per_task
        row_end = min(num_rows, row_begin + rows_per_task)
        panel_end = min(num_panels, panel_begin + panels_per_task)
        if row_begin != prepared:
            _prepare_operand(x, panels, row_begin, row_end, operand)
            prepared = row_begin
        if with_silu:
            _multiply_silu_task(x, operand, panels, out, row_begin, row_end, panel_begin, panel_end, spill)
        else:
            _multiply_task(x, operand, panels, out, row_begin, row_end, panel_begin, panel_end, spill)
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    keep(own)
    wait(team, phase, num_tasks)


@device
def multiply_phase(team, phase, x, panels, out):
    """out [M, N] = x [M, K] @ packed weight, shared by the team."""
    _multiply_tasks(team, phase, x, panels, out, False)


@device
def multiply_silu_phase(team, phase, x, panels, out):
    """out [M, I] = silu(gates) * ups, of x @ a weight by `pair_gate_up`: what is between stays near."""
    _multiply_tasks(team, phase, x, panels, out, True)


@device
def _multiply(thread, counters, x, panels, out):
    multiply_phase(Team(counters, thread), 0, x, panels, out)


@parallel_kernel
def matmul(x, w, out):
    """out [M, N] = x [M, K] @ w.T; x and out float32, w from a `pack_weight...`."""
    run_team(_multiply, (new_counters(1), x, w, out))


@device
def _multiply_silu(thread, counters, x, panels, out):
    multiply_silu_phase(Team(counters, thread), 0, x, panels, out)


@parallel_kernel
def matmul_silu(x, w, out):
    """out [M, I] = silu(x @ gates.T) * (x @ ups.T); w is packed by `pair_gate_up`."""
    run_team(_multiply_silu, (new_counters(1), x, w, out))
