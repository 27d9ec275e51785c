"""The whole model in one call, against the same steps in torch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels import cpu
from tests.engine.kernels.reference import (
    PAGE,
    AttentionProblem,
    attention,
    bfloat16_bits,
    from_cache,
    rms_norm,
    rope_tables,
    rotate,
    to_cache,
)

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    num_layers: int = 3
    hidden: int = 96
    num_heads: int = 6
    num_kv_heads: int = 2
    dim: int = 32
    intermediate: int = 160
    vocabulary: int = 300
    with_bias: bool = False
    with_head_norms: bool = False


@dataclass(frozen=True)
class Layer:
    """Weights in float32, [outputs, inputs]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Model:
    sizes: Sizes
    layers: list[Layer]
    final_norm: torch.Tensor
    head: torch.Tensor


def random_model(sizes: Sizes) -> Model:
    generator = torch.Generator().manual_seed(0)

    def matrix(num_outputs: int, num_inputs: int) -> torch.Tensor:
        weight = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
        rounded: torch.Tensor = weight.bfloat16().float()
        return rounded

    def norm(size: int) -> torch.Tensor:
        weight: torch.Tensor = 1 + 0.1 * torch.randn(size, generator=generator)
        return weight

    s = sizes
    qkv_size = (s.num_heads + 2 * s.num_kv_heads) * s.dim
    head_norm = s.dim if s.with_head_norms else 0
    layers = [
        Layer(
            norm(s.hidden), matrix(qkv_size, s.hidden), norm(qkv_size if s.with_bias else 0), norm(head_norm),
            norm(head_norm), matrix(s.hidden, s.num_heads * s.dim), norm(s.hidden),
            matrix(2 * s.intermediate, s.hidden), matrix(s.hidden, s.intermediate),
        )
        for _ in range(s.num_layers)
    ]  # fmt: skip
    return Model(sizes, layers, norm(s.hidden), matrix(s.vocabulary, s.hidden))


def pack(model: Model, kind: str, embedding: cpu.Float32) -> cpu.DecoderWeights:
    def packed(weight: torch.Tensor) -> cpu.PackedWeight:
        if kind == "int8":
            return cpu.pack_weight_int8(weight.numpy())
        return cpu.pack_weight(bfloat16_bits(weight) if kind == "bfloat16" else weight.numpy())

    def stacked(weights: list[torch.Tensor]) -> cpu.PackedWeight:
        matrices: Any = np.stack([packed(weight) for weight in weights])
        result: cpu.PackedWeight = matrices
        return result

    def matrices(name: str) -> cpu.PackedWeight:
        return stacked([getattr(layer, name) for layer in model.layers])

    gate_up = stacked([torch.from_numpy(cpu.pair_gate_up(layer.gate_up.numpy())) for layer in model.layers])

    def vectors(name: str) -> cpu.Float32:
        return np.stack([getattr(layer, name).numpy() for layer in model.layers])

    return cpu.DecoderWeights(
        embedding, vectors("attention_norm"), matrices("qkv"), vectors("qkv_bias"), vectors("q_norm"),
        vectors("k_norm"), matrices("output"), vectors("mlp_norm"), gate_up, matrices("down"),
        model.final_norm.numpy(), packed(model.head),
    )  # fmt: skip


def make_batch(contexts: list[tuple[int, int]], logit_rows: list[int]) -> tuple[cpu.DecoderBatch, int]:
    """A batch of (context length, new rows), and the number of blocks of its pool."""
    num_blocks = [-(-length // PAGE) for length, _ in contexts]
    order = np.random.default_rng(0).permutation(sum(num_blocks) + 1).astype(np.int32)
    tables = np.zeros((len(contexts), max(num_blocks)), np.int32)
    positions, slots, start = [], [], 0
    for row, ((length, new), count) in enumerate(zip(contexts, num_blocks, strict=True)):
        tables[row, :count] = order[start : start + count]
        start += count
        for position in range(length - new, length):
            positions.append(position)
            slots.append(tables[row, position // PAGE] * PAGE + position % PAGE)
    none = np.empty(0, np.int32)
    cu_query_lens = np.cumsum([0] + [new for _, new in contexts], dtype=np.int32)
    lengths = np.array([length for length, _ in contexts], np.int32)
    batch = cpu.DecoderBatch(
        np.arange(len(positions), dtype=np.int32), np.array(positions, np.int32), np.array(slots, np.int32),
        tables, cu_query_lens, lengths, np.array(logit_rows, np.int32), none, none.reshape(0, 1), none,
        cpu.causal(cu_query_lens, lengths),
    )  # fmt: skip
    return batch, len(order)


def run_reference(
    model: Model, hidden: torch.Tensor, batch: cpu.DecoderBatch, pool: cpu.Cache, dtype: str
) -> torch.Tensor:
    """Logits; writes keys and values to the pool."""
    s = model.sizes
    cos, sin = (torch.from_numpy(table)[batch.positions] for table in rope_tables(2000, s.dim))
    for layer, (k_cache, v_cache) in zip(model.layers, pool, strict=True):
        normed = rms_norm(hidden, layer.attention_norm, EPS)
        qkv = normed @ layer.qkv.T + (layer.qkv_bias if s.with_bias else 0)
        heads = qkv.view(len(hidden), -1, s.dim)
        q, k, v = torch.split(heads, [s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
        if s.with_head_norms:
            q, k = rms_norm(q, layer.q_norm, EPS), rms_norm(k, layer.k_norm, EPS)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        blocks, slots = batch.slot_mapping // PAGE, batch.slot_mapping % PAGE
        k_cache[blocks, :, slots] = to_cache(k, dtype)
        v_cache[blocks, :, slots] = to_cache(v.contiguous(), dtype)
        problem = AttentionProblem(
            q.numpy(),
            k_cache,
            v_cache,
            batch.block_tables,
            batch.cu_query_lens,
            batch.context_lens,
            s.dim**-0.5,
        )
        hidden = hidden + torch.from_numpy(attention(problem)).flatten(1) @ layer.output.T
        gate, up = (rms_norm(hidden, layer.mlp_norm, EPS) @ layer.gate_up.T).chunk(2, -1)
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer.down.T
    return rms_norm(hidden, model.final_norm, EPS)[batch.logit_rows] @ model.head.T


def check(
    model: Model,
    contexts: list[tuple[int, int]],
    logit_rows: list[int],
    kind: str,
    dtype: str,
    tolerance: float,
) -> None:
    s = model.sizes
    batch, num_blocks = make_batch(contexts, logit_rows)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(batch.positions), s.hidden, generator=generator)
    shape = s.num_layers, 2, num_blocks, s.num_kv_heads, PAGE, s.dim
    expected_pool = to_cache(torch.randn(*shape, generator=generator), dtype).copy()
    pool = expected_pool.copy()
    expected = run_reference(model, hidden, batch, expected_pool, dtype)
    logits = np.full((len(logit_rows), s.vocabulary), np.nan, np.float32)
    cpu.decoder_step(
        pack(model, kind, hidden.numpy()), cpu.DecoderShape(s.num_heads, s.intermediate, EPS, s.dim**-0.5),
        rope_tables(2000, s.dim), batch, pool, logits,
    )  # fmt: skip
    np.testing.assert_allclose(logits, expected.numpy(), atol=tolerance, rtol=0)
    actual_values, expected_values = from_cache(pool), from_cache(expected_pool)
    torch.testing.assert_close(actual_values, expected_values, atol=max(tolerance, 2e-2), rtol=0)


CONTEXTS = [(5, 5), (600, 1), (70, 3), (150, 120), (0, 0), (33, 1)]


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"), [("float32", "float32", 2e-5), ("bfloat16", "bfloat16", 3e-2)]
)
def test_step(kind: str, dtype: str, tolerance: float) -> None:
    """Only the last rows' logits are wanted."""
    check(random_model(Sizes()), CONTEXTS, [4, 5, 7, 8, 128, 129], kind, dtype, tolerance)


def test_all_rows() -> None:
    check(random_model(Sizes()), [(40, 1), (3, 3)], [0, 1, 2, 3], "float32", "float32", 2e-5)


def test_no_logits() -> None:
    """The middle of a prompt only fills the cache."""
    check(random_model(Sizes()), [(100, 100)], [], "float32", "float32", 2e-5)


def test_biases_and_head_norms() -> None:
    sizes = replace(Sizes(), with_bias=True, with_head_norms=True)
    check(random_model(sizes), CONTEXTS, [4, 5, 8, 129], "float32", "float32", 2e-5)


def test_int8_weights() -> None:
    """Quantisation costs a few hundredths of these logits, whose size is about 1."""
    check(random_model(Sizes()), CONTEXTS, [4, 5, 8, 129], "int8", "bfloat16", 0.15)
