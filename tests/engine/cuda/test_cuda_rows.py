"""Norms, activation, rotary embedding and cache writes in the simulator against plain torch."""

import pytest
import torch

from engine.gpu_check import references
from engine.kernels.cuda.kernels import CudaKernels, HeadNorms
from engine.kernels.cuda.plan import Tuning
from tests.engine.cuda.simulator import SimulatorLauncher

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.fixture(params=[32, 64], ids=["one-warp", "two-warps"])
def kernels(request: pytest.FixtureRequest) -> CudaKernels:
    return CudaKernels(SimulatorLauncher(), Tuning(max_threads=request.param))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(kernels: CudaKernels, dtype: torch.dtype) -> None:
    x, weight, out = torch.randn(2, 70), torch.rand(70), torch.empty(2, 70, dtype=dtype)
    kernels.rms_norm(x, weight, EPS, out)
    torch.testing.assert_close(out, references.rms_norm(x, weight, EPS).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual(kernels: CudaKernels, dtype: torch.dtype) -> None:
    residual, delta = torch.randn(2, 70), torch.randn(2, 70).to(dtype)
    weight, out = torch.rand(70), torch.empty(2, 70, dtype=dtype)
    expected = residual + delta.float()
    kernels.add_rms_norm(residual, delta, weight, EPS, out)
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(out, references.rms_norm(expected, weight, EPS).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernels: CudaKernels, dtype: torch.dtype) -> None:
    gate_up, out = (4 * torch.randn(2, 2 * 70)).to(dtype), torch.empty(2, 70, dtype=dtype)
    kernels.silu_mul(gate_up, out)
    torch.testing.assert_close(out, references.silu_mul(gate_up).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_rope_write_kv(kernels: CudaKernels, dtype: torch.dtype, normed: bool, head_dim: int) -> None:
    num_heads, num_kv_heads = 3, 2
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    angles = torch.rand(10, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([4, 0, 9], dtype=torch.int32)
    slots = torch.tensor([37, -1, 2], dtype=torch.int32)
    norms = HeadNorms(torch.rand(head_dim), torch.rand(head_dim), EPS) if normed else None
    q = torch.empty(3, num_heads, head_dim, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 4, num_kv_heads, 16, head_dim, dtype=dtype)
    kernels.rope_write_kv(qkv, cos, sin, positions, slots, q, k_cache, v_cache, norms)

    heads = qkv.view(3, -1, head_dim).float()
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        queries = references.rms_norm(queries, norms.q_weight, EPS)
        keys = references.rms_norm(keys, norms.k_weight, EPS)
    torch.testing.assert_close(q, references.rotate(queries, cos, sin, positions).to(dtype))
    expected_k, expected_v = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    rotated = references.rotate(keys, cos, sin, positions).to(dtype)
    for row, slot in ((0, 37), (2, 2)):
        expected_k[slot // 16, :, slot % 16] = rotated[row]
        expected_v[slot // 16, :, slot % 16] = values[row].to(dtype)
    torch.testing.assert_close(k_cache, expected_k)
    torch.testing.assert_close(v_cache, expected_v, rtol=0, atol=0)
