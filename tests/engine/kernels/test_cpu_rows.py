"""Norms, SiLU, rotary embedding and cache writes against torch."""

import numpy as np
import pytest
import torch

from engine.kernels import cpu
from tests.engine.kernels.reference import PAGE, from_cache, rms_norm, rope_tables, rotate, to_cache

SIZES = [(1, 576), (3, 64), (37, 96), (100, 1536), (2, 7)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_norm_of_an_embedding(num_rows: int, width: int, dtype: str) -> None:
    table, weight = random(50, width).to(getattr(torch, dtype)), random(width, seed=1)
    stored = table.numpy() if dtype == "float32" else table.view(torch.uint16).numpy()
    token_ids = np.random.default_rng(0).integers(0, 50, num_rows, np.int32)
    hidden, out = np.full((2, num_rows, width), np.nan, np.float32)
    cpu.embed_rms_norm(token_ids, stored, weight.numpy(), 1e-5, hidden, out)
    expected = table.float()[torch.from_numpy(token_ids)]
    torch.testing.assert_close(torch.from_numpy(hidden), expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.from_numpy(out), rms_norm(expected, weight, 1e-5))


@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_norm_of_a_sum(num_rows: int, width: int) -> None:
    residual, delta, weight = random(num_rows, width), random(num_rows, width, seed=1), random(width, seed=2)
    total = residual + delta
    out = np.full((num_rows, width), np.nan, np.float32)
    cpu.add_rms_norm(residual.numpy(), delta.numpy(), weight.numpy(), 1e-5, out)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(torch.from_numpy(out), rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (8, 1, 128), (4, 4, 96)])
def test_rope(num_heads: int, num_kv_heads: int, dim: int, dtype: str) -> None:
    num_rows, num_blocks = 21, 5
    qkv = random(num_rows, (num_heads + 2 * num_kv_heads) * dim)
    cos, sin = rope_tables(200, dim)
    positions = np.arange(150, 150 + num_rows, dtype=np.int32)
    slots = torch.randperm(num_blocks * PAGE, generator=torch.Generator().manual_seed(1))[:num_rows]
    slot_mapping = slots.int().numpy()
    slot_mapping[5] = -1
    old = random(2, num_blocks, num_kv_heads, PAGE, dim, seed=2)
    k_cache, v_cache = (to_cache(cache, dtype) for cache in old)
    q = np.full((num_rows, num_heads, dim), np.nan, np.float32)

    heads = qkv.view(num_rows, -1, dim)
    at = torch.from_numpy(cos)[positions], torch.from_numpy(sin)[positions]
    expected = [from_cache(cache) for cache in (k_cache, v_cache)]
    new_keys = rotate(heads[:, num_heads : num_heads + num_kv_heads], *at)
    for cache, new in zip(expected, (new_keys, heads[:, num_heads + num_kv_heads :]), strict=True):
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // PAGE, :, slot % PAGE] = from_cache(to_cache(new[row], dtype))

    cpu.rope_write_kv(qkv.numpy(), cos, sin, positions, slot_mapping, q, k_cache, v_cache)
    torch.testing.assert_close(torch.from_numpy(q), rotate(heads[:, :num_heads], *at))
    # Keys may round the other way where the rotation's last bit differs.
    tolerance = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    torch.testing.assert_close(from_cache(k_cache), expected[0], rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(from_cache(v_cache), expected[1], rtol=0, atol=0)


def test_rounding_to_the_cache_is_to_nearest_even() -> None:
    """Values halfway between two bfloat16, and their neighbours."""
    bits = np.arange(64, dtype=np.uint32) * 0x8000 + 0x3F800000
    values = np.stack([(bits + shift).astype(np.uint32) for shift in (0, 1, 0x7FFF)]).view(np.float32)
    qkv = np.zeros((3, 3 * 64), np.float32)
    qkv[:, 128:] = values
    cos, sin = rope_tables(3, 64)
    positions = np.arange(3, dtype=np.int32)
    q = np.empty((3, 1, 64), np.float32)
    k_cache, v_cache = (np.zeros((1, 1, PAGE, 64), np.uint16) for _ in range(2))
    cpu.rope_write_kv(qkv, cos, sin, positions, positions, q, k_cache, v_cache)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(v_cache[0, 0, :3], expected)
