"""The `logprobs` object of text completions: four parallel arrays."""

import math
from collections.abc import Sequence
from typing import Any

from services.frontend.active_request import Prompt
from services.frontend.http.spelling import finite
from services.frontend.outputs import TokenLogprob
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer

# The first token of a prompt follows nothing, so nothing says how likely it is.
UNKNOWN = math.nan


def logprobs_object(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "text_offset": [e.offset for e in entries],
        "token_logprobs": [None if math.isnan(e.logprob) else finite(e.logprob) for e in entries],
        "tokens": [tokenizer.token_text(e.token_id) for e in entries],
        "top_logprobs": [_top(e, tokenizer) for e in entries],
    }


def prompt_entries(
    prompt: Prompt, scored: Sequence[TokenLogprob], tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """Every prompt token with its place in the prompt's text; the first one's logprob is UNKNOWN."""
    detokenizer, offset = Detokenizer(tokenizer, skip_control=False), 0
    entries = []
    first = TokenLogprob(prompt.token_ids[0], UNKNOWN, [])
    for token_id, entry in zip(prompt.token_ids, [first, *scored], strict=True):
        entries.append(entry._replace(offset=offset))
        offset += len(detokenizer.push(token_id))
    return entries


def _top(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The alternatives, and the token itself, which may not be among them."""
    if math.isnan(entry.logprob):
        return None
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    return {tokenizer.token_text(token_id): finite(logprob) for token_id, logprob in pairs}
