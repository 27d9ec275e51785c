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
    prompt: Prompt, prompt_text: str, scored: Sequence[TokenLogprob], tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """Every prompt token with its place in `prompt_text`. `scored` has all but the first, or nothing when
    the request ended before they were known; what is missing is UNKNOWN."""
    detokenizer = Detokenizer(tokenizer, skip_control=False)
    lengths = [len(detokenizer.push(token_id)) for token_id in prompt.token_ids]
    # What the tokenizer put in front (BOS, a space) is no part of the text that the client wrote.
    offset = len(prompt_text) - sum(lengths)
    unknown = [TokenLogprob(i, UNKNOWN, []) for i in prompt.token_ids]
    entries = []
    for entry, length in zip([unknown[0], *(scored or unknown[1:])], lengths, strict=True):
        entries.append(entry._replace(offset=max(offset, 0)))
        offset += length
    return entries


def _top(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The alternatives, and the token itself, which may not be among them."""
    if math.isnan(entry.logprob):
        return None
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    return {tokenizer.token_text(token_id): finite(logprob) for token_id, logprob in pairs}
