"""Log probabilities of tokens, from the unmodified distribution."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


class Logprobs(NamedTuple):
    chosen: Float32  # [n]
    top_ids: Int32  # [n, num_top]
    top: Float32  # [n, num_top]


def logprobs_of(logits: torch.Tensor, token_ids: list[int], num_top: int) -> Logprobs:
    """Of one token in each row of float32 logits [n, vocab], with the `num_top` likeliest beside it."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1)
    top, top_ids = logprobs.topk(num_top, dim=-1)
    return Logprobs(chosen.cpu().numpy(), top_ids.int().cpu().numpy(), top.cpu().numpy())


def concatenate(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(
        np.concatenate([part.chosen for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top for part in parts]),
    )


def first_of(logprobs: Logprobs, count: int) -> Logprobs:
    return Logprobs(logprobs.chosen[:count], logprobs.top_ids[:count], logprobs.top[:count])
