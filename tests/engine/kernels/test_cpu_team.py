"""Threads of a kernel, and threads that call kernels."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from engine.kernels import cpu


def product(seed: int) -> tuple[cpu.Float32, cpu.Float32]:
    """A product and what numpy says."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((5 + seed % 7, 128), np.float32)
    w = generator.standard_normal((300, 128), np.float32)
    out = np.full((len(x), 300), np.nan, np.float32)
    cpu.matmul(x, cpu.pack_weight(w), out)
    return out, x @ w.T


def test_kernels_called_from_several_threads_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        for out, expected in pool.map(product, range(200)):
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_threads", range(1, numba.config.NUMBA_NUM_THREADS + 1))
def test_any_number_of_threads(num_threads: int) -> None:
    before = numba.get_num_threads()
    numba.set_num_threads(num_threads)
    try:
        out, expected = product(3)
    finally:
        numba.set_num_threads(before)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
