# mypy: allow-untyped-defs, allow-untyped-calls
"""Work sharing between the threads of one team.

A kernel is a sequence of phases, a phase is a number of independent tasks. Threads claim tasks from a counter
and go on when all tasks of the phase are done. A thread waits only for tasks that others hold, never for a
thread: one that the operating system has put aside between two tasks delays nobody, and a single thread would
finish the work.

    task = claim(team, phase)
    while task < num_tasks:
        ...
        task = claim_next(team, phase)
    wait(team, phase, num_tasks)
"""

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.jit import inlined
from engine.kernels.simd import I32, I64, Emitter, Value
from engine.kernels.vector_function import vector_function

# int64 counters of a phase: claimed tasks, done tasks, each on a cache line of its own.
_DONE = 8
_PHASE = 16
_SPINS_BEFORE_YIELD = 4096  # a power of two


def _counter(emit: Emitter, team: Value, phase: Value, which: int) -> Value:
    address = emit.offset(team, (phase, 8 * _PHASE), 8 * which)
    return emit.builder.inttoptr(address, I64.as_pointer())


def _emit_claim(emit: Emitter, _: list[Any], team: Value, phase: Value) -> Value:
    return emit.builder.atomic_rmw("add", _counter(emit, team, phase, 0), I64(1), "acq_rel")


def _emit_claim_next(emit: Emitter, dtypes: list[Any], team: Value, phase: Value) -> Value:
    emit.builder.atomic_rmw("add", _counter(emit, team, phase, _DONE), I64(1), "acq_rel")
    return _emit_claim(emit, dtypes, team, phase)


def _emit_wait(emit: Emitter, _: list[Any], team: Value, phase: Value, num_tasks: Value) -> None:
    builder = emit.builder
    spins = emit.variable(I64(0))
    check, again, end = (builder.append_basic_block(name) for name in ("check", "again", "end"))
    builder.branch(check)
    builder.position_at_end(check)
    num_done = builder.load_atomic(_counter(emit, team, phase, _DONE), "acquire", 8, typ=I64)
    builder.cbranch(builder.icmp_signed("<", num_done, num_tasks), again, end)
    builder.position_at_end(again)
    count = builder.add(builder.load(spins), I64(1))
    builder.store(count, spins)
    if platform.machine() in ("x86_64", "AMD64"):
        emit.call("llvm.x86.sse2.pause", ir.VoidType(), [])
    # With fewer free cores than threads, spinning would hold up the very thread that is waited for.
    with builder.if_then(
        builder.icmp_signed("==", builder.and_(count, I64(_SPINS_BEFORE_YIELD - 1)), I64(0))
    ):
        emit.call("sched_yield", I32, [])
    builder.branch(check)
    builder.position_at_end(end)


# claim(team, phase): the number of a task that nobody else runs; past the phase's last task, there is none
# left.
# claim_next(team, phase): reports the task in hand as done, and claims another.
# wait(team, phase, num_tasks): returns when all tasks of the phase are done; what they wrote is visible then.
claim = vector_function(_emit_claim, types.int64)
claim_next = vector_function(_emit_claim_next, types.int64)
wait = vector_function(_emit_wait)


@inlined
def new_team(num_phases):
    team = np.empty(num_phases * _PHASE, np.int64)
    for index in range(team.size):
        team[index] = 0
    return team
