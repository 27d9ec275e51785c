"""Small JSON pieces that chat and text completions share."""

import json
import math
from collections.abc import Sequence
from typing import Any

from services.frontend.outputs import Delta, TokenLogprob, Usage
from services.frontend.sampling import Sampling
from services.frontend.text.tokenizer import Tokenizer

# What stands for a probability of zero, as OpenAI's API has it; JSON has no -Infinity.
_NO_CHANCE = -9999.0

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "nexuskv": {
            "draft_tokens": usage.draft_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "drafts": {source: drafts._asdict() for source, drafts in usage.drafts.items()},
            "sequence_ids": usage.sequence_ids,
        },
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_CHANCE


def stop_reason(delta: Delta, sampling: Sampling) -> str | int | None:
    """What the client had named; an answer that the model itself ended has none."""
    asked = isinstance(delta.matched_stop, str) or delta.matched_stop in sampling.stop_token_ids
    return delta.matched_stop if asked else None


def visible_logprobs(delta: Delta) -> Sequence[TokenLogprob]:
    """Without the stop token that ended the choice: it is no part of the text."""
    return delta.logprobs[:-1] if isinstance(delta.matched_stop, int) else delta.logprobs


def prompt_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """One object per prompt token: token id → logprob and text; the first token has none."""
    values: list[dict[str, Any] | None] = [None]
    for entry in entries:
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        values.append(
            {
                str(i): {"logprob": finite(logprob), "decoded_token": tokenizer.token_text(i)}
                for i, logprob in pairs
            }
        )
    return values
