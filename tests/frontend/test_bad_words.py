"""Bad words: which token sequences the engine is told not to generate."""

from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import models, normalizers

from services.errors import ServiceError
from services.frontend.bad_words import token_sequences
from services.frontend.text.tokenizer import Tokenizer, Vocabulary
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body
from tests.frontend_system import MODULE_LOOP

pytestmark = MODULE_LOOP


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("Paris", [["Paris"], [" Paris"]]),
        (" Paris", [["Paris"], [" Paris"]]),
        ("French toast", [["French", " toast"], [" French", " toast"]]),
        # One token behind a space, three without it.
        ("strawberry", [["st", "raw", "berry"], [" strawberry"]]),
        # The space is a token of its own: what stands behind it is banned already.
        ("7", [["7"]]),
        ("<|im_end|>", [["<|im_end|>"]]),
        ("\n", [["\n"], [" \n"]]),
        (" ", [[" "], ["  "]]),
    ],
)
async def test_a_word_is_banned_by_itself_and_behind_a_space(
    tokenizer: Tokenizer, word: str, pieces: list[list[str]]
) -> None:
    sequences = token_sequences([word], tokenizer)
    assert [[tokenizer.token_text(token) for token in sequence] for sequence in sequences] == pieces


async def test_a_word_without_tokens_is_named() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.normalizer = normalizers.StripAccents()
    tokenizer = Tokenizer(backend, Vocabulary([b"a"], frozenset(), (), None, False, False))
    assert token_sequences(["a", "a"], tokenizer) == [(0,)]
    with pytest.raises(ServiceError, match='without tokens, got "\u0301"') as caught:
        token_sequences(["a", "\u0301"], tokenizer)
    assert caught.value.field == "bad_words"


async def test_within_a_text_a_word_has_no_space_that_only_texts_begin_with() -> None:
    pieces = ["▁", "\n", "P", "a", "Pa", "▁Pa"]
    merges = [("P", "a"), ("▁", "Pa")]
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    vocabulary = Vocabulary([p.encode() for p in pieces], frozenset(), (), None, False, space_prefix=True)
    assert token_sequences(["Pa"], Tokenizer(backend, vocabulary)) == [(5,), (4,)]


async def test_too_many_tokens_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ServiceError, match=r"at most 2048 tokens, got \d{4}"):
        token_sequences([f"{chr(0x1F600 + i)} {i}" * 8 for i in range(60)], tokenizer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": ["Hi", "Ho"]}),
        ("/v1/generate/stream", {"prompt": "Hi"}),
    ],
)
async def test_bad_words_reach_the_engine_as_tokens(
    http: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    assert (await http.post(path, json={**body, "bad_words": ["Paris", "7"]})).status_code == 200
    for submit in engine.submits:
        assert [list(word.ids) for word in submit.sampling.bad_words] == [[38634], [7042], [39]]
