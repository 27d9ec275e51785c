"""Verification of drafts and sampling in the simulator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu_check import references
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.plan import Tuning
from engine.kernels.sampling import DrawParameters
from engine.model import cuda_sampling
from tests.engine.cuda.simulator import SimulatorLauncher

KERNELS = CudaKernels(SimulatorLauncher(), Tuning(max_threads=32))


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_verify_drafts(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    token = st.integers(0, 1)
    drafts = data.draw(
        st.lists(st.lists(token, min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
    targets = [[*draft, 7] for draft in drafts]
    for target in targets:
        target[data.draw(st.integers(0, width))] = 5
    num_drafts = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    accepted, following = torch.empty(2, rows, dtype=torch.int32)
    KERNELS.verify_drafts(ints(drafts), ints(targets), ints(num_drafts), accepted, following)
    for row in range(rows):
        count = 0
        while count < num_drafts[row] and drafts[row][count] == targets[row][count]:
            count += 1
        assert accepted[row] == count
        assert following[row] == targets[row][count]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_verify_tree(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    parents, tokens = [-1], [9]
    for node in range(1, size):
        parent = data.draw(st.integers(0, node - 1))
        taken = {tokens[n] for n in range(1, node) if parents[n] == parent}
        parents.append(parent)
        tokens.append(data.draw(st.sampled_from([t for t in range(8) if t not in taken])))
    targets = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    padding = [0] * (8 - size)
    accepted, following = torch.empty(2, 1, dtype=torch.int32)
    path = torch.empty(1, 8, dtype=torch.int32)
    KERNELS.verify_tree(
        ints([tokens + padding]), ints([parents + padding]), ints([size]), ints([targets + padding]),
        accepted, path, following,
    )  # fmt: skip
    expected, token = references.verify_tree(tokens, parents, targets)
    assert path[0, : accepted[0]].tolist() == expected
    assert following[0] == token


def draw(
    kernels: CudaKernels, logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], list[int]]:
    """Tokens by the kernel and by the reference."""
    rows = logits.shape[0]
    ids = np.arange(rows)
    parameters = DrawParameters(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
        (ids * 7919 + (1 << 40)).astype(np.uint64) << np.uint64(20),
        ids % 2,
        ids + 100,
    )
    keys = zip(*(p.tolist() for p in parameters[4:]), strict=True)
    expected = [
        references.sample(
            row, parameters.temperature[0], top_k, parameters.top_p[0], parameters.min_p[0], key
        )
        for row, key in zip(logits.numpy(), keys, strict=True)
    ]
    return cuda_sampling.sample_rows(kernels, logits, parameters).tolist(), expected


FILTERS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (20, 0.8, 0.01), (500, 0.0, 0.0)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 2.5])
def test_samples_follow_filters_and_inverse_cdf(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 3 * torch.randn(3, 80, generator=torch.Generator().manual_seed(1))
    actual, expected = draw(KERNELS, logits, temperature, top_k, top_p, min_p)
    assert actual == expected


def test_temperature_0_takes_the_highest_logit_and_the_lowest_id_of_several() -> None:
    logits = torch.randint(0, 6, (8, 50), generator=torch.Generator().manual_seed(4)).float()
    actual, _ = draw(KERNELS, logits, 0.0, 3, 0.5, 0.0)
    assert actual == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_of_equal_logits_the_lowest_ids_are_kept(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randint(0, 3, (2, 70), generator=torch.Generator().manual_seed(2)).float()
    actual, expected = draw(KERNELS, logits, 1.0, top_k, top_p, min_p)
    assert actual == expected


def test_banned_tokens_are_never_drawn_and_the_last_one_left_always_is() -> None:
    logits = torch.full((2, 70), -torch.inf)
    logits[:, 41] = -3.0
    actual, _ = draw(KERNELS, logits, 1.5, 10, 0.9, 0.0)
    assert actual == [41, 41]


def test_the_number_of_threads_changes_nothing() -> None:
    logits = torch.randn(1, 80, generator=torch.Generator().manual_seed(3))
    wide = CudaKernels(SimulatorLauncher(), Tuning(max_threads=64))
    assert draw(wide, logits, 1.0, 50, 0.9, 0.0)[0] == draw(KERNELS, logits, 1.0, 50, 0.9, 0.0)[0]
