"""The tokenizer that a GGUF file carries in its `tokenizer.ggml.*` keys."""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.frontend.text.byte_level import piece_bytes
from services.frontend.text.errors import ModelTextError
from services.frontend.text.tokenizer import Tokenizer as NexusTokenizer
from services.frontend.text.tokenizer import Vocabulary

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> patterns that cut the text one after the other.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_CASELESS_WORDS.format(digits="{1,3}"),),
    "qwen2": (_CASELESS_WORDS.format(digits=""),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "starcoder": "smollm",
}
_MERGES_RANK_LAST = ("llama-bpe",)  # a word that is in the vocabulary is one token whatever the merges say


def build(metadata: Mapping[str, Any]) -> NexusTokenizer:
    """Builds the tokenizer of a GGUF file. Raises ModelTextError when its kind is not known."""
    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    if "tokens" not in keys:
        raise ModelTextError("the GGUF file carries no tokenizer (tokenizer.ggml.tokens is missing)")
    kind = keys.get("model")
    if kind == "gpt2":
        return _byte_level(keys)
    if kind == "llama":
        return _sentencepiece(keys)
    raise ModelTextError(f"tokenizer.ggml.model={kind} is not supported: must be gpt2 or llama")


def _byte_level(keys: Mapping[str, Any]) -> NexusTokenizer:
    pre = keys.get("pre", "default")
    pre = _SAME_AS.get(pre, pre)
    if pre not in _PATTERNS:
        known = ", ".join(sorted([*_PATTERNS, *_SAME_AS]))
        raise ModelTextError(f"tokenizer.ggml.pre={pre} is not supported: must be one of {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in keys["merges"]]
    model = models.BPE(vocab=_ids(keys["tokens"]), merges=merges, ignore_merges=pre in _MERGES_RANK_LAST)
    backend = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    special = _add_special_tokens(backend, keys)
    pieces = [
        token.encode() if i in special else piece_bytes(token) for i, token in enumerate(keys["tokens"])
    ]
    return NexusTokenizer(backend, _vocabulary(keys, pieces, add_bos=False, space_prefix=False))


def _sentencepiece(keys: Mapping[str, Any]) -> NexusTokenizer:
    tokens, space_prefix = keys["tokens"], bool(keys.get("add_space_prefix", True))
    unknown = tokens[keys.get("unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(
            vocab=_ids(tokens),
            merges=_merges_by_score(tokens, keys["scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.ByteFallback()
    _add_special_tokens(backend, keys)
    kinds = keys.get("token_type") or [0] * len(tokens)
    pieces = [
        bytes([int(token[3:-1], 16)]) if kind == _BYTE else token.replace("▁", " ").encode()
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return NexusTokenizer(backend, _vocabulary(keys, pieces, add_bos=True, space_prefix=space_prefix))


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece stores no merges: two pieces merge when the joined text is one, best score first."""
    ids = _ids(tokens)
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(backend: Tokenizer, keys: Mapping[str, Any]) -> set[int]:
    """Makes control and user-defined tokens match as wholes; answers their ids."""
    kinds = keys.get("token_type") or []
    control = [token for token, kind in zip(keys["tokens"], kinds, strict=False) if kind == _CONTROL]
    defined = [token for token, kind in zip(keys["tokens"], kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in defined])
    return {i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}


def _vocabulary(
    keys: Mapping[str, Any], pieces: list[bytes], *, add_bos: bool, space_prefix: bool
) -> Vocabulary:
    ends = (keys.get(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    return Vocabulary(
        pieces=pieces,
        control_ids=frozenset(i for i, kind in enumerate(keys.get("token_type") or []) if kind == _CONTROL),
        end_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_id=keys.get("bos_token_id"),
        add_bos=bool(keys.get("add_bos_token", add_bos)),
        space_prefix=space_prefix,
    )


def _ids(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}
