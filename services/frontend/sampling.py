"""How the next token is chosen: the client's wishes, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.errors import invalid
from services.frontend.rules import (
    INT32_MAX,
    BadWords,
    Flag,
    Integer,
    LogitBias,
    Number,
    Rule,
    StopStrings,
    TokenIdList,
    check_token_ids,
)

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024


@dataclass(frozen=True)
class Sampling:
    """Names and meanings as in SamplingParams of the proto; None: not asked for."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


# Fields of `Sampling` as clients may set them.
RULES: dict[str, Rule] = {
    "temperature": Number(0, 100),
    "top_p": Number(0, 1, above_low=True),
    "top_k": Integer(-1, INT32_MAX),
    "min_p": Number(0, 1),
    "frequency_penalty": Number(-2, 2),
    "presence_penalty": Number(-2, 2),
    "repetition_penalty": Number(0.01, 100),
    "logit_bias": LogitBias(),
    "seed": Integer(-(2**63), 2**63 - 1),
    "n": Integer(1, MAX_CHOICES),
    "max_tokens": Integer(1, INT32_MAX),
    "min_tokens": Integer(0, INT32_MAX),
    "stop": StopStrings(),
    "stop_token_ids": TokenIdList(MAX_STOP_TOKENS),
    "bad_words": BadWords(),
    "ignore_eos": Flag(),
    "logprobs": Integer(0, MAX_LOGPROBS),
    "prompt_logprobs": Integer(0, MAX_LOGPROBS),
}


def check_against_model(sampling: Sampling, vocab_size: int, max_num_seqs: int) -> None:
    """Raises for tokens that the model does not have and for limits that contradict each other."""
    check_token_ids("logit_bias", list(sampling.logit_bias), vocab_size)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.n > max_num_seqs:
        raise invalid("n", f"n must be at most {max_num_seqs} on this server, got {sampling.n}")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise invalid(
            "min_tokens",
            f"min_tokens must be at most max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}",
        )


def resolve_max_tokens(num_prompt: int, max_tokens: int | None, max_model_len: int, prompt_field: str) -> int:
    """Tokens to generate at most; without a limit what the context leaves. Never truncates: raises."""
    if num_prompt >= max_model_len:
        raise invalid(
            prompt_field,
            f"the prompt has {num_prompt} tokens; the model's context holds {max_model_len} "
            "and at least one must be left for the answer",
            "CONTEXT_LENGTH_EXCEEDED",
        )
    left = max_model_len - num_prompt
    if max_tokens is not None and max_tokens > left:
        raise invalid(
            "max_tokens",
            f"max_tokens asks for {max_tokens} tokens after a prompt of {num_prompt}; "
            f"the model's context holds {max_model_len}, which leaves {left}",
            "CONTEXT_LENGTH_EXCEEDED",
        )
    return left if max_tokens is None else max_tokens
