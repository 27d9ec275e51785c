"""Whole decode steps as CUDA graphs: recorded once for each number of sequences, replayed with one launch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.batch import Batch
from engine.kernels.cuda.launcher import Recorder
from engine.kernels.cuda.packing import Array, PackedArrays
from engine.kernels.cuda.plan import (
    AttentionPlan,
    Int32,
    Phase,
    SharedPrefix,
    Splits,
    fill,
    plan_attention,
)
from engine.kernels.cuda.tiles import TILE_FIELDS
from engine.kv_pool import BLOCK_SIZE
from engine.model.cuda_ops import CudaOps, DeviceBatch, batch_arrays, device_batch, shared_prefixes
from engine.shared_runs import SharedRuns

MAX_GROUPS = 8  # of sequences that share a prefix; what more there are read theirs each for itself
MAX_SEQUENCES = 256  # of a recorded step; a larger one keeps the GPU busy whoever launches it
Step = Callable[[DeviceBatch], torch.Tensor]


def buckets(max_sequences: int) -> tuple[int, ...]:
    """Numbers of sequences to record; a step takes the next that is large enough."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, MAX_SEQUENCES, 32))
    most = min(max_sequences, MAX_SEQUENCES)
    return (*(size for size in sizes if size < most), most)


class DecodeGraphs:
    """Answers batches in which every sequence has one row; `step` must do the same for the same shapes."""

    def __init__(self, step: Step, ops: CudaOps, max_sequences: int, max_context: int) -> None:
        self._sizes = buckets(max_sequences)
        self._max_blocks = max(2, -(-max_context // BLOCK_SIZE))  # two to share a block and have one
        recorder = ops.kernels.launcher.recorder()
        # The largest first: smaller ones then fit into its memory.
        self._recorded = {
            (size, shares): _RecordedStep(step, _Shape(ops, size, self._max_blocks, shares), recorder)
            for size in reversed(self._sizes)
            for shares in ((True, False) if size > 1 else (False,))
        }

    def run(self, batch: Batch) -> torch.Tensor | None:
        """What `step` answers, one row a sequence, valid until the next run; None: that fits no graph."""
        num_sequences = len(batch.context_lens)
        if (
            len(batch.token_ids) != num_sequences
            or num_sequences > self._sizes[-1]
            or batch.block_tables.shape[1] > self._max_blocks
        ):
            return None
        size = next(size for size in self._sizes if size >= num_sequences)
        prefixes = shared_prefixes(batch)
        return self._recorded[size, bool(prefixes)].run(batch, prefixes)


class _Shape:
    """A step of `size` sequences, to which smaller ones are padded; with or without shared prefixes."""

    def __init__(self, ops: CudaOps, size: int, max_blocks: int, shares: bool) -> None:
        self.ops, self.size, self.max_blocks = ops, size, max_blocks
        heads, tuning = ops.heads, ops.kernels.tuning
        longest = max_blocks * BLOCK_SIZE
        num_shared = -(-size * heads.group // heads.append_rows)
        own_rows = heads.decode_rows if heads.group <= heads.decode_rows else heads.append_rows
        self._num_own_tiles = size * -(-heads.group // own_rows)
        self.splits = Splits(
            own=fill(self._num_own_tiles * heads.num_kv_heads, longest, tuning),
            shared=fill(num_shared * heads.num_kv_heads, longest, tuning) if shares else 0,
        )
        # One tile more for each group that does not fill its last one.
        self._num_shared_tiles = num_shared + min(size // 2, MAX_GROUPS) if shares else 0

    def padded(self, batch: Batch, prefixes: Sequence[SharedPrefix]) -> tuple[AttentionPlan, list[Array]]:
        """Rows of padding write to no slot and are in no tile."""
        size = self.size
        plan = plan_attention(
            batch.cu_query_lens, batch.context_lens, self.ops.heads, self.ops.kernels.tuning,
            prefixes=prefixes[:MAX_GROUPS], fixed=self.splits,
        )  # fmt: skip
        own, *shared = plan.phases
        phases = [own._replace(tiles=_pad(own.tiles, (self._num_own_tiles, TILE_FIELDS)))]
        if self.splits.shared:
            tiles = shared[0].tiles if shared else own.tiles[:0]
            padded_tiles = _pad(tiles, (self._num_shared_tiles, TILE_FIELDS))
            phases.append(Phase(padded_tiles, False, self.splits.shared))
        is_merged = self.splits.own > 1 or self.splits.shared > 0
        rows = np.arange(size, dtype=np.int32)
        padded = replace(
            plan,
            phases=tuple(phases),
            query_ids=_pad(plan.query_ids, (2 * size,)),
            visible=_pad(plan.visible, (size,)),
            ancestors=np.zeros(size, np.int64),
            partial_rows=rows,
            merged_queries=rows if is_merged else rows[:0],
            merged_splits=_pad(plan.merged_splits, (size if is_merged else 0,)),
        )
        # The page tables are large and stay as they are: no tile reads beyond them.
        token_ids, positions, slots, _, *rest = batch_arrays(batch, padded, batch.block_tables)
        return padded, [
            _pad(token_ids, (size,)), _pad(positions, (size,)), _pad(slots, (size,), -1), rows, *rest,
        ]  # fmt: skip


class _RecordedStep:
    def __init__(self, step: Step, shape: _Shape, recorder: Recorder) -> None:
        self._shape = shape
        plan, arrays = shape.padded(*_warm_up_batch(shape))
        self._packed = PackedArrays(arrays, shape.ops.device)
        self._packed.send(arrays)
        batch = device_batch(plan, self._packed)
        self._recording = recorder(lambda: step(batch))

    def run(self, batch: Batch, prefixes: Sequence[SharedPrefix]) -> torch.Tensor:
        _, arrays = self._shape.padded(batch, prefixes)
        self._packed.send(arrays)
        self._recording.replay()
        return self._recording.result[: len(batch.context_lens)]


def _warm_up_batch(shape: _Shape) -> tuple[Batch, list[SharedPrefix]]:
    """The largest arrays of the shape; one token each, written nowhere; all share block 0 if some may."""
    num_sequences, shares = shape.size, shape.splits.shared > 0
    length = BLOCK_SIZE + 1 if shares else 1
    zeros = np.zeros(num_sequences, np.int32)
    batch = Batch(
        scheduled=(), token_ids=zeros, positions=zeros, slot_mapping=zeros - 1,
        cu_query_lens=np.arange(num_sequences + 1, dtype=np.int32), context_lens=zeros + length,
        block_tables=np.zeros((num_sequences, shape.max_blocks), np.int32), logit_rows=zeros,
        shared_runs=SharedRuns(zeros, np.zeros((1, 1), np.int32), np.full(1, BLOCK_SIZE, np.int32)),
    )  # fmt: skip
    return batch, [SharedPrefix(tuple(range(num_sequences)), BLOCK_SIZE)] if shares else []


def _pad(array: Array, shape: Sequence[int], filler: int = 0) -> Int32:
    padded = np.full(shape, filler, np.int32)
    padded[tuple(slice(0, n) for n in array.shape)] = array
    return padded
