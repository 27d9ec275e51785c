# mypy: allow-untyped-defs, allow-untyped-calls
"""All layers of a Llama-like model, and its logits, in one call.

With few rows a layer takes a fraction of a millisecond, so calls from Python and parallel regions would cost
as much as they do: the threads enter once and go through the phases of all layers together.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.attention import NUM_ATTENTION_PHASES, attention_phases, new_parts
from engine.kernels.attention_plan import plan_attention
from engine.kernels.jit import device, inlined, parallel_kernel, run_team
from engine.kernels.matmul import PackedWeight, multiply_phase, multiply_silu_phase
from engine.kernels.rope import rope_phase
from engine.kernels.rows import add_norm_phase, embed_norm_phase
from engine.kernels.simd import Cache, Float32, Int32, float_bits
from engine.kernels.team import Team, claim, finish, new_counters, wait
from engine.kernels.tree import Tree

_PHASES_PER_LAYER = 8 + NUM_ATTENTION_PHASES


class DecoderWeights(NamedTuple):
    """Weights of L layers, stacked, and of the head; norms and biases are float32. What a model lacks has a
    last axis of 0."""

    embedding: Cache  # [V, H], float32 or bfloat16 bits
    attention_norm: Float32  # [L, H]
    qkv: PackedWeight  # [L, ...], (Hq + 2 Hkv) D outputs: queries, keys, values
    qkv_bias: Float32  # [L, (Hq + 2 Hkv) D]
    q_norm: Float32  # [L, D]
    k_norm: Float32  # [L, D]
    output: PackedWeight  # [L, ...], H outputs
    mlp_norm: Float32  # [L, H]
    gate_up: PackedWeight  # [L, ...], 2 I outputs by `pair_gate_up`
    down: PackedWeight  # [L, ...], H outputs
    final_norm: Float32  # [H]
    head: PackedWeight  # V outputs


class DecoderShape(NamedTuple):
    num_heads: int
    intermediate_size: int
    norm_eps: float
    attention_scale: float


class DecoderBatch(NamedTuple):
    """A ragged batch, as `paged_attention_shared` and `rope_write_kv` describe it; the groups may be
    empty."""

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int32  # [T]
    block_tables: Int32  # [S, max_blocks]
    cu_query_lens: Int32  # [S + 1]
    context_lens: Int32  # [S]
    logit_rows: Int32  # [R]
    group_of: Int32  # [S]
    group_blocks: Int32  # [G, max_blocks]
    group_lens: Int32  # [G]
    tree: Tree


class _Buffers(NamedTuple):
    hidden: Float32  # [T, H]
    normed: Float32  # [T, H]
    qkv: Float32  # [T, (Hq + 2 Hkv) D]
    q: Float32  # [T, Hq, D]
    attended: Float32  # [T, Hq, D]
    delta: Float32  # [T, H]
    activated: Float32  # [T, I]
    part_sums: Float32
    part_stats: Float32
    last_hidden: Float32  # [R, H], where R < T
    last_attended: Float32  # [R, Hq D]


@inlined
def _new_buffers(num_rows, width, num_last, shape, num_kv_heads, dim, plan):
    num_heads, size = shape.num_heads, shape.intermediate_size
    sums, stats = new_parts(plan, num_heads, dim)
    return _Buffers(
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, (num_heads + 2 * num_kv_heads) * dim), np.float32),
        np.empty((num_rows, num_heads, dim), np.float32),
        np.empty((num_rows, num_heads, dim), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, size), np.float32),
        sums,
        stats,
        np.empty((num_last, width), np.float32),
        np.empty((num_last, num_heads * dim), np.float32),
    )


@inlined
def _attend(team, phase, layer, weights, shape, rope, batch, plan, pool, buffers, write_only):
    """From normed rows to what the output projection takes; write_only stops at the cache."""
    cos, sin = rope
    k_cache, v_cache = pool[layer, 0], pool[layer, 1]
    multiply_phase(team, phase, buffers.normed, weights.qkv[layer], buffers.qkv)
    rope_phase(
        team, phase + 1, buffers.qkv, weights.qkv_bias[layer], weights.q_norm[layer], weights.k_norm[layer],
        shape.norm_eps, cos, sin, batch.positions, batch.slot_mapping, buffers.q, k_cache, v_cache,
    )  # fmt: skip
    if not write_only:
        attention_phases(
            team, phase + 2, buffers.q, k_cache, v_cache, batch.block_tables, batch.group_blocks, plan,
            shape.attention_scale, buffers.attended, buffers.part_sums, buffers.part_stats,
        )  # fmt: skip


@device
def _feed_forward(team, phase, layer, residual, attended, next_norm, weights, shape, buffers):
    """The rest of a layer, on the first rows of the buffers; leaves them normed for the next."""
    num_rows, eps = residual.shape[0], shape.norm_eps
    normed, delta = buffers.normed[:num_rows], buffers.delta[:num_rows]
    activated = buffers.activated[:num_rows]
    multiply_phase(team, phase, attended, weights.output[layer], delta)
    add_norm_phase(team, phase + 1, residual, delta, weights.mlp_norm[layer], eps, normed)
    multiply_silu_phase(team, phase + 2, normed, weights.gate_up[layer], activated)
    multiply_phase(team, phase + 3, activated, weights.down[layer], delta)
    add_norm_phase(team, phase + 4, residual, delta, next_norm, eps, normed)


@inlined
def _select_phase(team, phase, rows, hidden, attended, buffers):
    """The rows that the last layer goes on with."""
    num_tasks = rows.shape[0]
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        row = rows[task]
        for index in range(hidden.shape[1]):
            buffers.last_hidden[task, index] = hidden[row, index]
        for index in range(attended.shape[1]):
            buffers.last_attended[task, index] = attended[row, index]
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    wait(team, phase, num_tasks)


@device
def _decode(thread, counters, weights, shape, rope, batch, plan, pool, buffers, logits):
    """One thread's way through all phases."""
    team, hidden = Team(counters, thread), buffers.hidden
    num_layers, num_rows, num_logits = pool.shape[0], hidden.shape[0], logits.shape[0]
    attended = buffers.attended.reshape(num_rows, -1)
    norm = weights.attention_norm[0]
    embed_norm_phase(
        team, 0, batch.token_ids, weights.embedding, norm, shape.norm_eps, hidden, buffers.normed
    )
    for layer in range(num_layers):
        phase = 1 + layer * _PHASES_PER_LAYER
        last = layer + 1 == num_layers
        stop = last and num_logits == 0
        _attend(team, phase, layer, weights, shape, rope, batch, plan, pool, buffers, stop)
        if stop:
            return
        norm = weights.final_norm if last else weights.attention_norm[layer + 1]
        residual, rows = hidden, attended
        if last and num_logits < num_rows:
            _select_phase(team, phase + 4, batch.logit_rows, hidden, attended, buffers)
            residual, rows = buffers.last_hidden, buffers.last_attended
        _feed_forward(team, phase + 5, layer, residual, rows, norm, weights, shape, buffers)
    multiply_phase(
        team, 1 + num_layers * _PHASES_PER_LAYER, buffers.normed[:num_logits], weights.head, logits
    )


@parallel_kernel
def _decoder_step(weights, shape, rope, batch, pool, logits):
    num_layers, _, _, num_kv_heads, _, dim = pool.shape
    counters = new_counters(2 + num_layers * _PHASES_PER_LAYER)
    plan = plan_attention(
        batch.cu_query_lens,
        batch.context_lens,
        batch.group_of,
        batch.group_lens,
        batch.tree,
        shape.num_heads // num_kv_heads,
    )
    num_rows = batch.token_ids.shape[0]
    num_last = logits.shape[0] if logits.shape[0] < num_rows else 0
    buffers = _new_buffers(num_rows, weights.embedding.shape[1], num_last, shape, num_kv_heads, dim, plan)
    run_team(_decode, (counters, weights, shape, rope, batch, plan, pool, buffers, logits))


def decoder_step(
    weights: DecoderWeights, shape: DecoderShape, rope: tuple[Float32, Float32], batch: DecoderBatch,
    pool: Cache, logits: Float32,
) -> None:  # fmt: skip
    """Runs a batch through the model: writes its keys and values, and the logits of the wanted rows.

    rope is cos, sin [P, D / 2]; pool [L, 2, B, Hkv, 16, D]; logits [R, V] gets rows
    logit_rows [R] of the batch, in ascending order; R may be 0.
    """
    _decoder_step(weights, shape, rope, batch, float_bits(pool), logits)
