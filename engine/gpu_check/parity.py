"""The kernels against plain torch on this GPU, over a wide grid of shapes and contexts."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from engine.gpu_check import references
from engine.gpu_check.problems import problem
from engine.gpu_check.report import Measurement
from engine.kernels.cuda.catalog import KernelSpec
from engine.kernels.cuda.kernels import CudaKernels, HeadNorms
from engine.kernels.cuda.plan import SharedPrefix
from engine.kernels.cuda.specs import ELEMENTS, decoder_specs
from engine.kernels.sampling import DrawParameters
from engine.kernels.tree import Tree
from engine.model.cuda_sampling import sample_rows

# Greatest difference, relative to the greatest value: a few units in the last place of the results.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HEAD_DIMS, GROUPS = (64, 96, 128), (1, 3, 4, 8)
Kernels = Callable[[int], CudaKernels]  # by head_dim


class Scenario(NamedTuple):
    name: str
    query_lens: list[int]
    context_lens: list[int]
    num_shared_blocks: int = 0


SCENARIOS = (
    Scenario("decode", [1] * 6, [1, 16, 17, 300, 2049, 5000]),
    Scenario("verify", [5, 6, 1, 3], [5, 400, 33, 2100]),
    Scenario("prefill", [700, 33, 1, 130], [700, 1500, 900, 130]),
    Scenario("shared", [1] * 24, [1040 + 7 * s for s in range(24)], 64),
    Scenario("shared_few", [1, 1, 2], [600, 577, 3000], 36),
)


class Sizes(NamedTuple):
    """How large problems are; a simulator needs smaller ones."""

    scenarios: tuple[Scenario, ...] = SCENARIOS
    tree_prefix: int = 530
    tree_nodes: int = 40
    rows: int = 37
    width: int = 2600
    sampled_rows: int = 480
    vocab: int = 32_000


def specs(kernels: Kernels) -> list[KernelSpec]:
    shapes = product(TOLERANCE, HEAD_DIMS, GROUPS)
    return [
        spec
        for dtype, head_dim, group in shapes
        for normed in (False, True)
        for spec in decoder_specs(ELEMENTS[dtype], head_dim, group, normed, kernels(head_dim).tuning)
    ]


def measure(kernels: Kernels, device: torch.device, sizes: Sizes | None = None) -> list[Measurement]:
    sizes = sizes or Sizes()
    worst: dict[str, tuple[float, float]] = {}
    torch.manual_seed(0)
    for dtype, head_dim in product(TOLERANCE, HEAD_DIMS):
        errors = list(_row_errors(kernels(head_dim), sizes, dtype, head_dim, device))
        for group in GROUPS:
            errors += _attention_errors(kernels(head_dim), sizes, dtype, head_dim, group, device)
        for name, error in errors:
            key = f"parity.{name}.{ELEMENTS[dtype]}"
            worst[key] = max(worst.get(key, (0.0, 0.0))[0], error), TOLERANCE[dtype]
    measurements = [
        Measurement(name, error, "of the greatest value", "lower", tolerance)
        for name, (error, tolerance) in sorted(worst.items())
    ]
    return [*measurements, _sampling_agreement(kernels(64), sizes, device)]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN counts as a whole."""
    difference = (actual.float() - expected.float()).abs().nan_to_num(torch.inf).max()
    return float(difference / expected.abs().max())


def _attention_errors(
    kernels: CudaKernels, sizes: Sizes, dtype: torch.dtype, head_dim: int, group: int, device: torch.device
) -> Iterator[tuple[str, float]]:
    for name, query_lens, context_lens, shared_blocks in sizes.scenarios:
        p = problem(
            dtype, query_lens, context_lens, num_kv_heads=2, group=group, head_dim=head_dim,
            num_shared_blocks=shared_blocks, device=device,
        )  # fmt: skip
        everyone = tuple(range(len(query_lens)))
        prefixes = [SharedPrefix(everyone, shared_blocks * 16)] if shared_blocks else []
        yield name, _error(p.answer(kernels, prefixes=prefixes), p.expected())

    prefix, num_nodes = sizes.tree_prefix, sizes.tree_nodes
    p = problem(
        dtype,
        [num_nodes],
        [prefix + num_nodes],
        num_kv_heads=2,
        group=group,
        head_dim=head_dim,
        device=device,
    )
    ancestors, sees = _random_tree(num_nodes)
    tree = Tree(np.full(num_nodes, prefix, np.int32), ancestors)
    context = torch.ones(num_nodes, prefix, dtype=torch.bool)
    yield "tree", _error(p.answer(kernels, tree), p.expected([torch.cat([context, sees], 1)]))


def _random_tree(num_nodes: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], torch.Tensor]:
    """Ancestors as bits, and which node (row) sees which (column)."""
    random = np.random.default_rng(0)
    ancestors = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes):
        above = ancestors[random.integers(node)] if node else np.int64(0)
        ancestors[node] = above | np.int64(1) << np.int64(node)
    bits = ancestors[:, None] >> np.arange(num_nodes) & 1
    return ancestors, torch.from_numpy(bits.astype(bool))


def _row_errors(
    kernels: CudaKernels, sizes: Sizes, dtype: torch.dtype, head_dim: int, device: torch.device
) -> Iterator[tuple[str, float]]:
    rows, width, eps = sizes.rows, sizes.width, 1e-5
    num_heads, num_kv_heads = 6, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    residual, delta, weight = normal(rows, width), normal(rows, width).to(dtype), normal(width)
    out = torch.empty(rows, width, dtype=dtype, device=device)
    total = residual + delta.float()
    kernels.add_rms_norm(residual, delta, weight, eps, out)
    yield "add_rms_norm", max(_error(residual, total), _error(out, references.rms_norm(total, weight, eps)))
    kernels.rms_norm(residual, weight, eps, out)
    yield "rms_norm", _error(out, references.rms_norm(total, weight, eps))

    gate_up = normal(rows, 2 * width).to(dtype)
    kernels.silu_mul(gate_up, out)
    yield "silu_mul", _error(out, references.silu_mul(gate_up))

    positions = torch.randint(0, 500, (rows,), device=device, dtype=torch.int32)
    slots = torch.randperm(64, device=device)[:rows].int()
    angles = 6 * torch.rand(500, head_dim // 2, device=device)
    q = torch.empty(rows, num_heads, head_dim, dtype=dtype, device=device)
    k_cache, v_cache = torch.zeros(2, 4, num_kv_heads, 16, head_dim, dtype=dtype, device=device)
    qkv = normal(rows, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    norms = HeadNorms(normal(head_dim), normal(head_dim), eps)
    heads_of = qkv.view(rows, -1, head_dim)
    queries, keys, values = torch.split(heads_of, [num_heads, num_kv_heads, num_kv_heads], 1)
    at = slots // 16, slice(None), slots % 16
    for chosen in (None, norms):
        kernels.rope_write_kv(qkv, angles.cos(), angles.sin(), positions, slots, q, k_cache, v_cache, chosen)
        for name, heads, found, norm in (
            ("rope_q", queries, q, norms.q_weight),
            ("rope_k", keys, k_cache[at], norms.k_weight),
        ):
            normed = heads.float() if chosen is None else references.rms_norm(heads.float(), norm, eps)
            yield name, _error(found, references.rotate(normed, angles.cos(), angles.sin(), positions))
    yield "write_v", _error(v_cache[at], values.float())


def _sampling_agreement(kernels: CudaKernels, sizes: Sizes, device: torch.device) -> Measurement:
    """Share of rows for which the reference draws the same token; rounding at a boundary may cost one."""
    rows = sizes.sampled_rows
    ids = np.arange(rows)
    logits = 3 * torch.randn(rows, sizes.vocab)
    temperature = np.resize([0.7, 0.0, 1.0, 1.3], rows).astype(np.float32)
    top_k = np.resize([40, 0, 5], rows).astype(np.int32)
    top_p = np.resize([0.9, 1.0, 0.5, 1.0, 0.95], rows).astype(np.float32)
    min_p = np.resize([0.0, 0.02], rows).astype(np.float32)
    seeds, choices, positions = ids.astype(np.uint64) << np.uint64(33), ids % 3, ids + 1000
    parameters = DrawParameters(temperature, top_k, top_p, min_p, seeds, choices, positions)
    drawn = sample_rows(kernels, logits.to(device), parameters)
    keys = list(zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True))
    expected = [
        references.sample(
            logits[row].numpy(), float(temperature[row]), int(top_k[row]), float(top_p[row]),
            float(min_p[row]), keys[row],
        )
        for row in range(rows)
    ]  # fmt: skip
    agreement = float((drawn == np.array(expected)).mean())
    return Measurement("parity.sample_rows", agreement, "share of rows", "higher", 0.99)
