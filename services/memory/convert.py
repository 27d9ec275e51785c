"""The memory manager's requests, answers and views, from and to messages."""

from memory_manager.answers import AcquireResult, UpdateAnswer
from memory_manager.columns import Int32s, Int64s
from memory_manager.errors import InvalidRequestError
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, Truncate, UpdateRequest
from memory_manager.views import (
    BlockDelta,
    BlockSnapshot,
    EngineMatch,
    EngineStats,
    Event,
    Explanation,
    Removed,
    Stats,
    Stored,
    TenantStats,
)
from nexuskv.v1 import memory_pb2 as pb
from services.arrays import unpack_int32, unpack_int64


def int32s(data: bytes, name: str) -> Int32s:
    try:
        return unpack_int32(data)
    except ValueError:
        raise _bad_length(name, data, 4) from None


def int64s(data: bytes, name: str) -> Int64s:
    try:
        return unpack_int64(data)
    except ValueError:
        raise _bad_length(name, data, 8) from None


def _bad_length(name: str, data: bytes, size: int) -> InvalidRequestError:
    return InvalidRequestError(
        "BAD_ARRAY_LENGTH", f"{name} holds {len(data)} bytes, not a multiple of {size}"
    )


def update_from_pb(r: pb.UpdateSequencesRequest) -> UpdateRequest:
    """Raises InvalidRequestError when an array is malformed."""
    return UpdateRequest(
        epoch=r.epoch,
        op_seq=r.op_seq,
        launched_step=r.launched_step,
        completed_step=r.completed_step,
        advance=Advance(
            int64s(r.advance.sequence_ids, "advance.sequence_ids"),
            int32s(r.advance.num_tokens, "advance.num_tokens"),
            int32s(r.advance.tokens, "advance.tokens"),
            int32s(r.advance.num_written, "advance.num_written"),
            int32s(r.advance.num_drafts, "advance.num_drafts"),
        ),
        truncate=Truncate(
            int64s(r.truncate.sequence_ids, "truncate.sequence_ids"),
            int32s(r.truncate.num_blocks_kept, "truncate.num_blocks_kept"),
        ),
        release=Release(int64s(r.release.sequence_ids, "release.sequence_ids")),
        fork=Fork(int64s(r.fork.parent_ids, "fork.parent_ids"), int64s(r.fork.child_ids, "fork.child_ids")),
        room=Room(
            int64s(r.room.sequence_ids, "room.sequence_ids"),
            int32s(r.room.num_tokens_ahead, "room.num_tokens_ahead"),
        ),
        acquires=tuple(map(_acquire_from_pb, r.acquires)),
    )


def _acquire_from_pb(acquire: pb.Acquire) -> Acquire:
    return Acquire(
        sequence_id=acquire.sequence_id,
        tokens=int32s(acquire.tokens, "acquire.tokens"),
        tenant=acquire.tenant,
        salt=acquire.salt,
        adapter=acquire.adapter,
        priority=acquire.priority,
        match_prefix=acquire.match_prefix,
    )


def answer_to_pb(answer: UpdateAnswer) -> pb.UpdateSequencesResponse:
    advance, fork, room = answer.advance, answer.fork, answer.room
    return pb.UpdateSequencesResponse(
        advance=pb.AdvanceResult(
            replaced_sequence_ids=advance.replaced_sequence_ids.tobytes(),
            replaced_indices=advance.replaced_indices.tobytes(),
            replaced_blocks=advance.replaced_blocks.tobytes(),
            draft_sequence_ids=advance.draft_sequence_ids.tobytes(),
            draft_base_lengths=advance.draft_base_lengths.tobytes(),
            num_draft_tokens=advance.num_draft_tokens.tobytes(),
            draft_tokens=advance.draft_tokens.tobytes(),
        ),
        fork=pb.ForkResult(
            granted=fork.granted.tobytes(),
            num_copies=fork.num_copies.tobytes(),
            copy_src=fork.copy_src.tobytes(),
            copy_dst=fork.copy_dst.tobytes(),
        ),
        room=pb.RoomResult(num_blocks=room.num_blocks.tobytes(), blocks=room.blocks.tobytes()),
        acquires=map(_acquired_to_pb, answer.acquires),
        wake=answer.wake.tobytes(),
        num_free=answer.num_free,
        num_fenced=answer.num_fenced,
        num_evictable=answer.num_evictable,
    )


def _acquired_to_pb(result: AcquireResult) -> pb.AcquireResult:
    return pb.AcquireResult(
        status=pb.AcquireResult.Status.ValueType(result.status),
        block_table=result.block_table.tobytes(),
        num_cached=result.num_cached,
        num_needed=result.num_needed,
        num_limit=result.num_limit,
    )


def matches_to_pb(matches: list[EngineMatch]) -> pb.LookupPrefixResponse:
    message = pb.LookupPrefixResponse.EngineMatch
    return pb.LookupPrefixResponse(
        matches=[message(engine_id=m.engine_id, num_cached=m.num_cached) for m in matches]
    )


def stats_to_pb(stats: Stats) -> pb.GetStatsResponse:
    return pb.GetStatsResponse(
        engines=map(_engine_to_pb, stats.engines),
        bytes_of_state=stats.bytes_of_state,
        draft_index_bytes=stats.draft_index_bytes,
        uptime_s=stats.uptime_s,
        journal_bytes=stats.journal_bytes,
    )


def _engine_to_pb(e: EngineStats) -> pb.GetStatsResponse.Engine:
    return pb.GetStatsResponse.Engine(
        engine_id=e.engine_id,
        epoch=e.epoch,
        model_fingerprint=e.model_fingerprint,
        num_blocks=e.num_blocks,
        num_free=e.num_free,
        num_private=e.num_private,
        num_ready=e.num_ready,
        num_fenced=e.num_fenced,
        num_quarantined=e.num_quarantined,
        num_evictable=e.num_evictable,
        num_sequences=e.num_sequences,
        num_waiting=e.num_waiting,
        num_evictions=e.num_evictions,
        num_query_tokens=e.num_query_tokens,
        num_hit_tokens=e.num_hit_tokens,
        num_forks=e.num_forks,
        num_coalesced_tokens=e.num_coalesced_tokens,
        num_truncated_blocks=e.num_truncated_blocks,
        num_replaced_blocks=e.num_replaced_blocks,
        tenants=map(_tenant_to_pb, e.tenants),
    )


def _tenant_to_pb(t: TenantStats) -> pb.GetStatsResponse.Tenant:
    return pb.GetStatsResponse.Tenant(
        tenant=t.tenant,
        num_blocks=t.num_blocks,
        num_pinned=t.num_pinned,
        quota=t.quota,
        floor=t.floor,
        num_evictions=t.num_evictions,
    )


def snapshot_to_pb(s: BlockSnapshot) -> pb.InspectBlocksResponse:
    return pb.InspectBlocksResponse(
        engine_id=s.engine_id,
        snapshot_seq=s.snapshot_seq,
        states=s.states.tobytes(),
        num_users=s.num_users.tobytes(),
        depths=s.depths.tobytes(),
        owners=s.owners.tobytes(),
        tenants=s.tenants,
        parents=s.parents.tobytes(),
    )


def delta_to_pb(d: BlockDelta) -> pb.WatchBlocksResponse:
    return pb.WatchBlocksResponse(
        delta=pb.WatchBlocksResponse.Delta(
            from_seq=d.from_seq,
            to_seq=d.to_seq,
            blocks=d.blocks.tobytes(),
            states=d.states.tobytes(),
            num_users=d.num_users.tobytes(),
            depths=d.depths.tobytes(),
            owners=d.owners.tobytes(),
        )
    )


def explanation_to_pb(e: Explanation) -> pb.ExplainSequenceResponse:
    message = pb.ExplainSequenceResponse(
        sequence_id=e.sequence_id,
        num_tokens=e.num_tokens,
        num_cached=e.num_cached,
        missed_at_block=e.missed_at_block,
        reason=pb.ExplainSequenceResponse.MissReason.ValueType(e.reason),
        evicted_seconds_ago=e.evicted_seconds_ago,
        evicted_for_tenant=e.evicted_for_tenant,
        num_more_blocks=e.num_more_blocks,
    )
    if e.eviction_cause is not None:
        message.eviction_cause = pb.ExplainSequenceResponse.EvictionCause.ValueType(e.eviction_cause)
    return message


def event_to_pb(event: Event) -> pb.WatchEventsResponse:
    message = pb.WatchEventsResponse(seq=event.seq, engine_id=event.engine_id)
    match event.change:
        case Stored(blocks, tokens, parent_block):
            message.stored.blocks = blocks.tobytes()
            message.stored.tokens = tokens.tobytes()
            message.stored.parent_block = -1 if parent_block is None else parent_block
        case Removed(blocks):
            message.removed.blocks = blocks.tobytes()
        case _:
            message.cleared.SetInParent()
    return message
