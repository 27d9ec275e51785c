"""Bandwidth of copies and of decode attention, speed of prefill, shared prefixes and small kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.gpu_check.parity import Kernels
from engine.gpu_check.problems import Problem, problem
from engine.gpu_check.report import Measurement
from engine.gpu_check.timing import seconds
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.plan import SharedPrefix
from engine.model.cuda_ops import attend_last

DTYPE = torch.bfloat16
TARGET_SHARE = 0.6  # of the copy bandwidth, for decode attention
# Enough K/V that what is read comes from memory, not from the cache before it.
BYTES_IN_TURN = 2 << 30


class Heads(NamedTuple):
    name: str
    num_kv_heads: int
    group: int
    head_dim: int


LARGE = Heads("8x4x128", 8, 4, 128)  # Llama 3 8B
SMALL = Heads("3x3x64", 3, 3, 64)  # SmolLM2 135M
UNGROUPED = Heads("32x1x128", 32, 1, 128)  # Llama 2 7B
WIDE = Heads("8x8x128", 8, 8, 128)  # Llama 3 70B
DECODES = [
    (LARGE, 32, 2048),
    (LARGE, 128, 2048),
    (LARGE, 8, 8192),
    (LARGE, 1, 65536),
    (SMALL, 128, 2048),
    (UNGROUPED, 16, 2048),
    (WIDE, 32, 4096),
]


def measure(kernels: Kernels, device: torch.device) -> list[Measurement]:
    copied = _copy_bandwidth(device)
    measurements = [Measurement("copy", copied / 1e12, "TB/s read and written", "higher")]
    for heads, batch, context in DECODES:
        measurements += _decode(kernels(heads.head_dim), heads, batch, context, copied, device)
    for context in (2048, 8192):
        measurements += _prefill(kernels(LARGE.head_dim), 2048, context, device)
    measurements += _shared(kernels(LARGE.head_dim), device)
    return [*measurements, *_small(kernels(LARGE.head_dim), device)]


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def _decode_problem(heads: Heads, contexts: list[int], device: torch.device, shared: int = 0) -> Problem:
    return problem(
        DTYPE, [1] * len(contexts), contexts, num_kv_heads=heads.num_kv_heads, group=heads.group,
        head_dim=heads.head_dim, num_shared_blocks=shared, device=device,
    )  # fmt: skip


def _attention_seconds(
    kernels: CudaKernels, p: Problem, bytes_read: int, prefixes: list[SharedPrefix] | None = None
) -> float:
    """Of one layer, with as many caches in turn as keep each out of the GPU's own."""
    plan = p.plan(kernels, prefixes=prefixes or [])
    out = torch.empty_like(p.q)
    num_layers = max(2, BYTES_IN_TURN // bytes_read)
    caches = [(p.k_cache, p.v_cache)]
    caches += [(p.k_cache.clone(), p.v_cache.clone()) for _ in range(num_layers - 1)]

    def all_layers() -> torch.Tensor:
        for k_cache, v_cache in caches:
            kernels.paged_attention(p.q, k_cache, v_cache, plan, p.scale, out)
        return out

    # As a graph, so that launching costs next to nothing.
    return seconds(kernels.launcher.recorder()(all_layers).replay) / num_layers


def _decode(
    kernels: CudaKernels, heads: Heads, batch: int, context: int, copied: float, device: torch.device
) -> list[Measurement]:
    p = _decode_problem(heads, [context] * batch, device)
    bytes_read = 2 * batch * context * heads.num_kv_heads * heads.head_dim * DTYPE.itemsize
    bandwidth = bytes_read / _attention_seconds(kernels, p, bytes_read)
    name = f"decode.{heads.name}.batch{batch}.context{context}"
    return [
        Measurement(name, bandwidth / 1e12, "TB/s of K and V", "higher"),
        Measurement(f"{name}.share", bandwidth / copied, "of the copy bandwidth", "higher", TARGET_SHARE),
    ]


def _prefill(kernels: CudaKernels, num_queries: int, context: int, device: torch.device) -> list[Measurement]:
    """By the append kernel, and by torch on gathered pages: what LONG_PREFILL chooses between."""
    p = problem(
        DTYPE, [num_queries], [context], num_kv_heads=LARGE.num_kv_heads, group=LARGE.group,
        head_dim=LARGE.head_dim, device=device,
    )  # fmt: skip
    plan, out = p.plan(kernels), torch.empty_like(p.q)
    blocks = torch.tensor(p.block_tables[0], dtype=torch.int32, device=device)
    gathered = torch.empty(
        2, LARGE.num_kv_heads, len(blocks) * 16, LARGE.head_dim, dtype=DTYPE, device=device
    )

    def append() -> None:
        kernels.paged_attention(p.q, p.k_cache, p.v_cache, plan, p.scale, out)

    def by_torch() -> None:
        kernels.gather_blocks(p.k_cache, blocks, gathered[0])
        kernels.gather_blocks(p.v_cache, blocks, gathered[1])
        attend_last(p.q, gathered[0, :, :context], gathered[1, :, :context], p.scale)

    pairs = num_queries * (context - num_queries) + num_queries * (num_queries + 1) / 2
    operations = 4 * pairs * LARGE.num_kv_heads * LARGE.group * LARGE.head_dim
    name = f"prefill.{LARGE.name}.queries{num_queries}.context{context}"
    return [
        Measurement(f"{name}.append", operations / seconds(append) / 1e12, "TFLOP/s", "higher"),
        Measurement(f"{name}.torch", operations / seconds(by_torch) / 1e12, "TFLOP/s", "higher"),
    ]


def _shared(kernels: CudaKernels, device: torch.device) -> list[Measurement]:
    batch, shared_tokens = 32, 4096
    contexts = [shared_tokens + 200 + s for s in range(batch)]
    p = _decode_problem(LARGE, contexts, device, shared_tokens // 16)
    token_bytes = 2 * LARGE.num_kv_heads * LARGE.head_dim * DTYPE.itemsize
    read_once = token_bytes * (shared_tokens + sum(contexts) - batch * shared_tokens)
    prefixes = [SharedPrefix(tuple(range(batch)), shared_tokens)]
    each, once = (_attention_seconds(kernels, p, read_once, which) for which in (None, prefixes))
    return [
        Measurement("shared.each_for_itself", each * 1e6, "us a layer", "lower"),
        Measurement("shared.once", once * 1e6, "us a layer", "lower"),
    ]


def _small(kernels: CudaKernels, device: torch.device) -> list[Measurement]:
    rows, width, vocab = 4096, 4096, 128_256
    residual, weight = torch.randn(rows, width, device=device), torch.ones(width, device=device)
    delta = torch.randn(rows, width, device=device).to(DTYPE)
    out = torch.empty_like(delta)
    gate_up = torch.randn(rows, 2 * 14336, device=device).to(DTYPE)
    activated = torch.empty(rows, 14336, device=device, dtype=DTYPE)
    logits = torch.randn(64, vocab, device=device)
    ones, zeros = torch.ones(64, device=device), torch.zeros(64, device=device)
    seeds = torch.arange(64, device=device)
    tokens = torch.empty(64, dtype=torch.int32, device=device)

    def sample(top_k: int, top_p: float) -> Callable[[], None]:
        ks = torch.full((64,), top_k, dtype=torch.int32, device=device)
        ps = torch.full((64,), top_p, device=device)
        return lambda: kernels.sample_rows(logits, ones, ks, ps, zeros, seeds, seeds, seeds, tokens)

    norm = seconds(lambda: kernels.add_rms_norm(residual, delta, weight, 1e-5, out))
    silu = seconds(lambda: kernels.silu_mul(gate_up, activated))
    return [
        Measurement("add_rms_norm", rows * width * 12 / norm / 1e12, "TB/s", "higher"),
        Measurement("silu_mul", rows * 14336 * 6 / silu / 1e12, "TB/s", "higher"),
        Measurement("sample.64x128k", seconds(sample(0, 1.0)) * 1e6, "us", "lower"),
        Measurement("sample.64x128k.top_k_top_p", seconds(sample(50, 0.9)) * 1e6, "us", "lower"),
    ]
