# mypy: allow-untyped-defs, allow-untyped-calls
"""Row by row kernels of a transformer: embedding, normalisation, residual sum."""

import numpy as np

from engine.kernels.jit import NUM_THREADS, device, inlined, kernel
from engine.kernels.team import alone, claim, finish, wait
from engine.kernels.vector_function import load_float

_TASKS_PER_THREAD = 4


@inlined
def rows_per_task(num_rows):
    return max(1, num_rows // (NUM_THREADS * _TASKS_PER_THREAD))


@inlined
def _normalise_row(x, weight, eps, out, row):
    width = x.shape[1]
    squares = np.float32(0.0)
    for index in range(width):
        squares += x[row, index] * x[row, index]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    for index in range(width):
        out[row, index] = x[row, index] * scale * weight[index]


@device
def embed_norm_phase(team, phase, token_ids, embedding, weight, eps, hidden, out):
    """`embed_rms_norm`, shared by the team."""
    num_rows, width = hidden.shape
    size = rows_per_task(num_rows)
    num_tasks = -(-num_rows // size)
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        for row in range(task * size, min(num_rows, (task + 1) * size)):
            start = token_ids[row] * np.int64(width)
            for index in range(width):
                hidden[row, index] = load_float(embedding, start + index)
            _normalise_row(hidden, weight, eps, out, row)
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    wait(team, phase, num_tasks)


@device
def add_norm_phase(team, phase, residual, delta, weight, eps, out):
    """residual [T, H] += delta; out = residual / rms(residual) * weight."""
    num_rows, width = residual.shape
    size = rows_per_task(num_rows)
    num_tasks = -(-num_rows // size)
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        for row in range(task * size, min(num_rows, (task + 1) * size)):
            for index in range(width):
                residual[row, index] += delta[row, index]
            _normalise_row(residual, weight, eps, out, row)
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    wait(team, phase, num_tasks)


@kernel
def embed_rms_norm(token_ids, embedding, weight, eps, hidden, out):
    """hidden [T, H] = embedding [V, H] of the tokens [T], out = hidden / rms(hidden) * weight [H].

    The embedding is float32, or bfloat16 bits.
    """
    embed_norm_phase(alone(), 0, token_ids, embedding, weight, eps, hidden, out)


@kernel
def add_rms_norm(residual, delta, weight, eps, out):
    """residual [T, H] += delta [T, H] in place, then out = residual / rms(residual) * weight [H]."""
    add_norm_phase(alone(), 0, residual, delta, weight, eps, out)
