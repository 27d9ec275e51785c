"""Writing, gathering, copying and compacting pages in the simulator."""

import pytest
import torch

from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.plan import Tuning
from tests.engine.cuda.simulator import SimulatorLauncher

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, HEAD_DIM = 2, 64
KERNELS = CudaKernels(SimulatorLauncher(), Tuning(max_threads=64))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(dtype: torch.dtype, num_layers: int = 2, num_blocks: int = 5) -> torch.Tensor:
    """Keys and values of all layers: [L, 2, num_blocks, Hkv, 16, D]."""
    return torch.randn(num_layers, 2, num_blocks, HEADS, 16, HEAD_DIM).to(dtype)


def slot(cache: torch.Tensor, index: int) -> torch.Tensor:
    return cache[..., index // 16, :, index % 16, :]


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_leaves_padding_out(dtype: torch.dtype) -> None:
    k_cache, v_cache = pool(dtype)[0]
    k, v = torch.randn(2, 3, HEADS, HEAD_DIM).to(dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for row, at in ((0, 17), (2, 63)):
        slot(expected_k, at)[:], slot(expected_v, at)[:] = k[row], v[row]
    KERNELS.write_kv(k, v, ids(17, -1, 63), k_cache, v_cache)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_blocks(dtype: torch.dtype) -> None:
    cache = pool(dtype)[1, 0]
    out = torch.empty(HEADS, 3 * 16, HEAD_DIM, dtype=dtype)
    KERNELS.gather_blocks(cache, ids(4, 0, 2), out)
    assert torch.equal(out, cache[[4, 0, 2]].transpose(0, 1).flatten(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_of_one_layer_and_of_all(dtype: torch.dtype) -> None:
    pages = pool(dtype)
    expected = pages.clone()
    expected[1, :, 3] = expected[1, :, 0]
    KERNELS.copy_blocks(pages[1, 0], pages[1, 1], ids(0), ids(3))
    assert torch.equal(pages, expected)
    expected[:, :, [0, 4]] = expected[:, :, [2, 1]]
    KERNELS.copy_blocks(pages[:, 0], pages[:, 1], ids(2, 1), ids(0, 4))
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compact_kv_moves_in_order(dtype: torch.dtype) -> None:
    pages = pool(dtype)
    expected = pages.clone()
    # Slot 20 is read before it is overwritten; the second sequence moves across blocks.
    for source, target in ((20, 18), (22, 20), (64, 31)):
        slot(expected, target)[:] = slot(expected, source)
    KERNELS.compact_kv(pages[:, 0], pages[:, 1], ids(20, 22, 64), ids(18, 20, 31), ids(0, 2, 2, 3))
    assert torch.equal(pages, expected)
