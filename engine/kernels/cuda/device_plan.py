"""An attention plan on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.kernels.cuda.packing import Array
from engine.kernels.cuda.plan import AttentionPlan, Int32, Phase
from engine.kernels.cuda.tiles import FIRST_SPLIT


class DevicePhase(NamedTuple):
    tiles: torch.Tensor  # int32 [n, TILE_FIELDS]
    decodes: bool
    num_splits: int


class DevicePlan(NamedTuple):
    """`AttentionPlan` with the page tables int32 [S, max_blocks]."""

    phases: tuple[DevicePhase, ...]
    num_splits: int  # partial results of a row at most
    query_ids: torch.Tensor
    visible: torch.Tensor
    ancestors: torch.Tensor
    partial_rows: torch.Tensor
    merged_queries: torch.Tensor
    merged_splits: torch.Tensor
    block_tables: torch.Tensor


def arrays_of(plan: AttentionPlan, block_tables: Int32) -> list[Array]:
    """What must be sent for `device_plan`."""
    return [
        plan.query_ids,
        plan.visible,
        plan.ancestors,
        plan.partial_rows,
        plan.merged_queries,
        plan.merged_splits,
        block_tables,
        *(phase.tiles for phase in plan.phases),
    ]


def device_plan(plan: AttentionPlan, sent: Sequence[torch.Tensor]) -> DevicePlan:
    query_ids, visible, ancestors, partial_rows, merged_queries, merged_splits, block_tables = sent[:7]
    phases = tuple(
        DevicePhase(tiles, phase.decodes, phase.num_splits)
        for phase, tiles in zip(plan.phases, sent[7:], strict=True)
    )
    return DevicePlan(
        phases=phases,
        num_splits=max((_num_splits(phase) for phase in plan.phases), default=0),
        query_ids=query_ids,
        visible=visible,
        ancestors=ancestors,
        partial_rows=partial_rows,
        merged_queries=merged_queries,
        merged_splits=merged_splits,
        block_tables=block_tables,
    )


def _num_splits(phase: Phase) -> int:
    return int(phase.tiles[:, FIRST_SPLIT].max()) + phase.num_splits
