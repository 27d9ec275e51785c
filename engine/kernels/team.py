# mypy: allow-untyped-defs, allow-untyped-calls
"""Work sharing between the threads of one team.

A kernel is a sequence of phases, a phase is a number of independent tasks. The tasks lie in segments, one for
each thread (for every few, if there are many): a thread claims its own segment's tasks one after the other,
so that it reads memory in order, and then what others have left. It goes on when all tasks of the phase are
done. So it waits only for tasks that others hold, never for a thread: one that the operating system has put
aside between two tasks delays nobody, and a single thread would finish the work.

    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        ...
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    wait(team, phase, num_tasks)
"""

import platform
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from engine.kernels.jit import NUM_THREADS, device, inlined
from engine.kernels.simd import I32, I64, Emitter, Value
from engine.kernels.vector_function import vector_function

_NUM_SEGMENTS = min(NUM_THREADS, 8)
# int64 counters of a phase, each on a cache line of its own: tasks claimed of each segment, tasks done.
_LINE = 8
_PHASE = (_NUM_SEGMENTS + 1) * _LINE
_SPINS_BEFORE_YIELD = 4096  # a power of two


class Team(NamedTuple):
    """What a thread knows of its team."""

    counters: npt.NDArray[np.int64]
    thread: int


def _counter(emit: Emitter, counters: Value, phase: Value, which: Value) -> Value:
    address = emit.offset(counters, (phase, 8 * _PHASE), (which, 8 * _LINE))
    return emit.builder.inttoptr(address, I64.as_pointer())


def _emit_increment(emit: Emitter, _: list[Any], counters: Value, phase: Value, which: Value) -> Value:
    return emit.builder.atomic_rmw("add", _counter(emit, counters, phase, which), I64(1), "acq_rel")


def _emit_wait(emit: Emitter, _: list[Any], counters: Value, phase: Value, num_tasks: Value) -> None:
    builder = emit.builder
    spins = emit.variable(I64(0))
    check, again, end = (builder.append_basic_block(name) for name in ("check", "again", "end"))
    builder.branch(check)
    builder.position_at_end(check)
    done = _counter(emit, counters, phase, I64(_NUM_SEGMENTS))
    num_done = builder.load_atomic(done, "acquire", 8, typ=I64)
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


_increment = vector_function(_emit_increment, types.int64)
_wait = vector_function(_emit_wait)


@inlined
def new_counters(num_phases):
    counters = np.empty(num_phases * _PHASE, np.int64)
    for index in range(counters.size):
        counters[index] = 0
    return counters


@inlined
def alone():
    """A team of one, for one phase."""
    return Team(new_counters(1), 0)


@device
def claim(team, phase, num_tasks):
    """The number of a task that nobody else runs; num_tasks if there is none left."""
    for index in range(_NUM_SEGMENTS):
        segment = (team.thread + index) % _NUM_SEGMENTS
        begin = segment * num_tasks // _NUM_SEGMENTS
        size = (segment + 1) * num_tasks // _NUM_SEGMENTS - begin
        place = _increment(team.counters, phase, segment)
        if place < size:
            return begin + place
    return num_tasks


@inlined
def finish(team, phase):
    """Reports a task as done."""
    _increment(team.counters, phase, _NUM_SEGMENTS)


@inlined
def wait(team, phase, num_tasks):
    """Returns when all tasks of the phase are done; what they wrote is visible then."""
    _wait(team.counters, phase, num_tasks)
