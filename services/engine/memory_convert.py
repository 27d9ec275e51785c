"""The engine's updates and their answers, to and from messages."""

from itertools import accumulate

from engine.memory_client import (
    Acquire,
    AcquireResult,
    AcquireStatus,
    DraftOffer,
    ForkResult,
    Replacement,
    Update,
    UpdateAnswer,
)
from nexuskv.v1 import memory_pb2 as pb
from services.arrays import pack_int32, pack_int64, unpack_int32, unpack_int64

_STATUS = {
    pb.AcquireResult.STATUS_GRANTED: AcquireStatus.GRANTED,
    pb.AcquireResult.STATUS_WAIT: AcquireStatus.WAIT,
    pb.AcquireResult.STATUS_SHORT: AcquireStatus.SHORT,
    pb.AcquireResult.STATUS_NEVER: AcquireStatus.NEVER,
}


def update_to_pb(update: Update, epoch: int, op_seq: int) -> pb.UpdateSequencesRequest:
    request = pb.UpdateSequencesRequest(
        epoch=epoch,
        op_seq=op_seq,
        launched_step=update.launched_step,
        completed_step=update.completed_step,
        acquires=[_acquire_to_pb(acquire) for acquire in update.acquires],
    )
    if update.advances:
        request.advance.sequence_ids = pack_int64([a.sequence_id for a in update.advances])
        request.advance.num_tokens = pack_int32([len(a.tokens) for a in update.advances])
        request.advance.tokens = pack_int32([token for a in update.advances for token in a.tokens])
        request.advance.num_written = pack_int32([a.num_written for a in update.advances])
        if any(a.num_drafts for a in update.advances):
            request.advance.num_drafts = pack_int32([a.num_drafts for a in update.advances])
    if update.truncates:
        request.truncate.sequence_ids = pack_int64([t.sequence_id for t in update.truncates])
        request.truncate.num_blocks_kept = pack_int32([t.num_blocks_kept for t in update.truncates])
    if update.releases:
        request.release.sequence_ids = pack_int64(update.releases)
    if update.forks:
        request.fork.parent_ids = pack_int64([f.parent_id for f in update.forks])
        request.fork.child_ids = pack_int64([f.child_id for f in update.forks])
    if update.rooms:
        request.room.sequence_ids = pack_int64([r.sequence_id for r in update.rooms])
        request.room.num_tokens_ahead = pack_int32([r.num_tokens_ahead for r in update.rooms])
    return request


def answer_from_pb(response: pb.UpdateSequencesResponse) -> UpdateAnswer:
    advance = response.advance
    replaced = zip(
        unpack_int64(advance.replaced_sequence_ids).tolist(),
        unpack_int32(advance.replaced_indices).tolist(),
        unpack_int32(advance.replaced_blocks).tolist(),
        strict=True,
    )
    drafts = zip(
        unpack_int64(advance.draft_sequence_ids).tolist(),
        unpack_int32(advance.draft_base_lengths).tolist(),
        _split(advance.draft_tokens, advance.num_draft_tokens),
        strict=True,
    )
    return UpdateAnswer(
        replacements=[Replacement(*entry) for entry in replaced],
        drafts=[DraftOffer(*entry) for entry in drafts],
        forks=_forks_from_pb(response.fork),
        rooms=_split(response.room.blocks, response.room.num_blocks),
        acquires=[_acquire_from_pb(result) for result in response.acquires],
        wake=unpack_int64(response.wake).tolist(),
        num_free=response.num_free,
        num_fenced=response.num_fenced,
        num_evictable=response.num_evictable,
    )


def _acquire_to_pb(acquire: Acquire) -> pb.Acquire:
    return pb.Acquire(
        sequence_id=acquire.sequence_id,
        tenant=acquire.tenant,
        salt=acquire.salt,
        adapter=acquire.adapter,
        priority=acquire.priority,
        tokens=pack_int32(acquire.tokens),
        match_prefix=acquire.match_prefix,
    )


def _acquire_from_pb(result: pb.AcquireResult) -> AcquireResult:
    table: list[int] = unpack_int32(result.block_table).tolist()
    return AcquireResult(
        _STATUS[result.status], table, result.num_cached, result.num_needed, result.num_limit
    )


def _forks_from_pb(fork: pb.ForkResult) -> list[ForkResult]:
    pairs = zip(_split(fork.copy_src, fork.num_copies), _split(fork.copy_dst, fork.num_copies), strict=True)
    return [
        ForkResult(bool(granted), list(zip(src, dst, strict=True)))
        for granted, (src, dst) in zip(unpack_int32(fork.granted).tolist(), pairs, strict=True)
    ]


def _split(data: bytes, counts: bytes) -> list[list[int]]:
    """A concatenated int32 array as one list per count."""
    values, sizes = unpack_int32(data).tolist(), unpack_int32(counts).tolist()
    ends = list(accumulate(sizes))
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
