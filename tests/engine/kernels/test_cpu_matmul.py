# mypy: allow-untyped-calls
"""Products with packed weights, against torch."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numba import from_dtype, njit

from engine.kernels import cpu
from engine.kernels.matmul import max_quantised_rows
from engine.kernels.pairs import multiply_pairs, narrow, pair_rows
from engine.kernels.quantised import HAS_VNNI
from engine.kernels.quantised_wide import multiply_wide_panel, narrow_wide_rows, new_wide_operand
from engine.kernels.tile import PANEL, multiply_rows
from tests.engine.kernels.reference import bfloat16_bits

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 33, 96, 97, 200]
QUANTISED = [(8, 8), (4, 8), (8, 16), (4, 16)]  # bits of weights and rows
SHAPES = [(960, 576), (576, 1536), (1, 2), (15, 6), (16, 64), (17, 62), (100, 130)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multiply(x: torch.Tensor, packed: cpu.PackedWeight, num_outputs: int) -> torch.Tensor:
    out = np.full((x.shape[0], num_outputs), np.nan, np.float32)
    cpu.matmul(x.numpy(), packed, out)
    return torch.from_numpy(out)


@pytest.mark.parametrize(("num_outputs", "depth"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_product(num_outputs: int, depth: int, dtype: str) -> None:
    w = random(num_outputs, depth)
    if dtype == "bfloat16":
        w = w.bfloat16().float()
        packed = cpu.pack_weight(bfloat16_bits(w))
    else:
        packed = cpu.pack_weight(w.numpy())
    for num_rows in ROWS:
        # Some processors round x to bfloat16 too.
        x = random(num_rows, depth, seed=num_rows).to(getattr(torch, dtype)).float()
        expected = (x.double() @ w.double().T).float()
        torch.testing.assert_close(multiply(x, packed, num_outputs), expected, rtol=1e-5, atol=1e-6 * depth)


@pytest.mark.parametrize("size", [7, 48, 100])
def test_product_of_gates_and_ups(size: int) -> None:
    w = random(2 * size, 64)
    for num_rows in (1, 2, 5, 40):
        x = random(num_rows, 64, seed=1)
        x[0] *= 100  # gates in the hundreds: no overflow
        out = np.full((num_rows, size), np.nan, np.float32)
        cpu.matmul_silu(x.numpy(), cpu.pack_weight(cpu.pair_gate_up(w.numpy())), out)
        gates, ups = (x @ w.T).chunk(2, -1)
        expected = torch.nn.functional.silu(gates) * ups
        torch.testing.assert_close(torch.from_numpy(out), expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", *QUANTISED])
def test_a_row_does_not_depend_on_its_neighbours(kind: Any) -> None:
    x, w = random(50, 96), random(40, 96, seed=1)
    packed: cpu.PackedWeight
    limit = len(x)
    if kind in QUANTISED:
        packed = pack_quantised(w, kind)[0]
        limit = max_quantised_rows(from_dtype(packed.dtype))
    else:
        packed = cpu.pack_weight(bfloat16_bits(w) if kind == "bfloat16" else w.numpy())
    for num_rows in (1, 2, 3, 5, 11, 29):
        together = multiply(x[:limit] if num_rows <= limit else x, packed, 40)
        assert torch.equal(multiply(x[:num_rows], packed, 40), together[:num_rows])


def pack_quantised(w: torch.Tensor, kind: tuple[int, int]) -> tuple[cpu.PackedWeight, torch.Tensor]:
    """With what the packed weight stands for. kind: bits of weights and rows."""
    bits, row_bits = kind
    if bits == 8:
        return cpu.pack_weight_int8(w.numpy(), row_bits), quantised(w, 8)
    blocks = gguf.quantize(w.numpy(), Type.Q4_1)
    return cpu.pack_weight_int4(blocks, row_bits), torch.from_numpy(gguf.dequantize(blocks, Type.Q4_1))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("num_outputs", "depth"), [(960, 576), (7, 32), (100, 96)])
def test_quantised_product(num_outputs: int, depth: int, kind: tuple[int, int]) -> None:
    packed, w = pack_quantised(random(num_outputs, depth), kind)
    limit = max_quantised_rows(from_dtype(packed.dtype))
    for num_rows in ROWS[:-1]:  # the last makes two tasks
        x = random(num_rows, depth, seed=num_rows)
        out = np.full((num_rows, num_outputs), np.nan, np.float32)
        cpu.matmul(x.numpy(), packed, out)
        if num_rows <= limit:
            exact, atol = quantised(x, kind[1]).double() @ w.double().T, 1e-4 * depth**0.5
        else:
            exact, atol = x.bfloat16().double() @ w.bfloat16().double().T, 0.1  # weights' ties
        torch.testing.assert_close(torch.from_numpy(out), exact.float(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_for_many_rows(kind: tuple[int, int]) -> None:
    """What processors do that multiply pairs of bfloat16; here it may be made of other instructions."""
    packed, w = pack_quantised(random(40, 96), kind)
    x = random(50, 96, seed=1)
    out = np.full((50, len(packed) * PANEL), np.nan, np.float32)
    by_widening(x.numpy(), packed, out)
    exact = x.bfloat16().double() @ w.bfloat16().double().T
    torch.testing.assert_close(torch.from_numpy(out[:, :40]), exact.float(), rtol=1e-4, atol=0.1)


def quantised(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to 8 or 16 bits in groups of 32."""
    groups = values.reshape(len(values), -1, 32)
    most = 127 if bits == 8 else 127 * 256 + 127 if HAS_VNNI else 2**15 - 1
    scales = groups.abs().amax(-1, keepdim=True) / most
    return (torch.round(groups / scales) * scales).reshape(values.shape)


@pytest.mark.parametrize("row_bits", [8, 16])
def test_int8_of_zeros_and_extremes(row_bits: int) -> None:
    x = torch.zeros(2, 64)
    x[0, 32:] = 1e30
    w = torch.zeros(3, 64)
    w[1] = 1.0
    w[2] = -1.0
    out = np.full((2, 3), np.nan, np.float32)
    cpu.matmul(x.numpy(), cpu.pack_weight_int8(w.numpy(), row_bits), out)
    expected = torch.tensor([[0, 32e30, -32e30], [0, 0, 0]])
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-6, atol=0)


def test_weights_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="even depth"):
        cpu.pack_weight(np.zeros((4, 3), np.uint16))
    with pytest.raises(ValueError, match="float64"):
        cpu.pack_weight(np.zeros((4, 4), np.float64))
    with pytest.raises(ValueError, match="groups of 32"):
        cpu.pack_weight_int8(np.zeros((4, 48), np.float32))


@njit  # type: ignore[untyped-decorator]
def narrow_all(x: cpu.Float32, words: npt.NDArray[np.uint32]) -> None:
    narrow(x, 0, words, 0, x.size)


@njit  # type: ignore[untyped-decorator]
def pair_all(rows: npt.NDArray[np.uint16], words: npt.NDArray[np.uint32]) -> None:
    pair_rows(rows, 0, rows.shape[0], rows.shape[1], words, 0)


@njit  # type: ignore[untyped-decorator]
def by_rows(words: npt.NDArray[np.uint32], panels: npt.NDArray[np.uint32], out: cpu.Float32) -> None:
    depth = words.shape[1]
    w_panel, target = (0, PANEL, depth * PANEL), (0, out.shape[1])
    for accumulate in (0, 1):
        multiply_rows(words, (0, depth), words.shape[0], panels, w_panel, depth, out, target, 2, accumulate)


@njit  # type: ignore[untyped-decorator]
def by_pairs(words: npt.NDArray[np.uint32], panels: npt.NDArray[np.uint32], out: cpu.Float32) -> None:
    depth = words.shape[1]
    w_panel, target = (0, PANEL, depth * PANEL), (0, out.shape[1])
    for accumulate in (0, 1):
        multiply_pairs(words, (0, depth), words.shape[0], panels, w_panel, depth, out, target, 2, accumulate)


@njit  # type: ignore[untyped-decorator]
def by_widening(x: cpu.Float32, packed: cpu.PackedWeight, out: cpu.Float32) -> None:
    operand = new_wide_operand(x.shape[0], x.shape[1])
    narrow_wide_rows(x, 0, x.shape[0], operand)
    for panel in range(packed.shape[0]):
        multiply_wide_panel(operand, x.shape[0], packed, panel, out, panel * PANEL, out.shape[1])


@pytest.mark.parametrize("multiply", [by_rows, by_pairs])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_pairs_of_bfloat16_on_both_sides(multiply: Any, num_rows: int) -> None:
    """What processors with such instructions run; here it may be made of others."""
    x, w = random(num_rows, 64), random(2 * PANEL, 64, seed=1)
    words = np.empty((num_rows, 32), np.uint32)
    narrow_all(x.numpy(), words)
    np.testing.assert_array_equal(words.view(np.uint16), bfloat16_bits(x))
    out = np.full((num_rows, 2 * PANEL), np.nan, np.float32)
    multiply(words, cpu.pack_weight(bfloat16_bits(w)), out)
    expected = 2 * (x.bfloat16().double() @ w.bfloat16().double().T)
    torch.testing.assert_close(torch.from_numpy(out), expected.float(), rtol=1e-5, atol=1e-5)


def test_pairs_of_rows() -> None:
    rows = np.arange(5 * 32, dtype=np.uint16).reshape(5, 32)
    words = np.full((3, 32), 7, np.uint32)
    pair_all(rows, words)
    halves = words.view(np.uint16).reshape(3, 32, 2)
    np.testing.assert_array_equal(halves[:, :, 0], rows[::2])
    np.testing.assert_array_equal(halves[:2, :, 1], rows[1::2])
    assert not halves[2, :, 1].any()
