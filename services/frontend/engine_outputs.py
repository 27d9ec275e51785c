"""Packed arrays of the engine's messages ⇄ Python values."""

import random
from array import array
from collections.abc import Sequence

from nexuskv.v1 import engine_pb2, inference_pb2
from services.frontend.outputs import TokenLogprob
from services.frontend.sampling import Sampling


def pack_ids(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """int32[n] → n ints."""
    if len(data) == 4:
        return [int.from_bytes(data, "little", signed=True)]
    return memoryview(data).cast("i").tolist()


def unpack_logprobs(
    token_ids: Sequence[int], chosen: bytes, top_ids: bytes, top: bytes
) -> list[TokenLogprob]:
    """chosen: float32[n]; top_ids, top: int32 and float32 [n, k]. One entry per token."""
    values = memoryview(chosen).cast("f").tolist()
    flat_ids, flat = memoryview(top_ids).cast("i").tolist(), memoryview(top).cast("f").tolist()
    width = len(flat) // len(values) if values else 0
    rows = [slice(i * width, (i + 1) * width) for i in range(len(values))]
    return [
        TokenLogprob(token_id, value, list(zip(flat_ids[row], flat[row], strict=True)))
        for token_id, value, row in zip(token_ids, values, rows, strict=True)
    ]


def engine_sampling(
    sampling: Sampling, max_tokens: int, end_ids: tuple[int, ...], bad_words: Sequence[Sequence[int]]
) -> engine_pb2.EngineSampling:
    """`max_tokens` as the context allows; `end_ids` end the answer unless the client ignores them;
    `bad_words` as tokens."""
    seed = random.getrandbits(64) if sampling.seed is None else sampling.seed % 2**64
    stops = dict.fromkeys([*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_ids)])
    return engine_pb2.EngineSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(stops),
        num_logprobs=sampling.logprobs,
        num_prompt_logprobs=sampling.prompt_logprobs,
        bad_words=[inference_pb2.TokenIds(ids=word) for word in bad_words],
    )
