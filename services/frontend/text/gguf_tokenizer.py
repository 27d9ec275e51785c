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
_BOS_FIRST = ("llama-bpe",)  # unless the file says otherwise
# How the ends of a turn, a message and a document are spelt, of which files name one or two.
_ENDS = frozenset({
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>",
    "<|end_of_turn|>", "<end_of_turn>", "<EOT>",
})  # fmt: skip
_MERGES_RANK_LAST = ("llama-bpe",)  # a word that is in the vocabulary is one token whatever the merges say


def build(metadata: Mapping[str, Any]) -> NexusTokenizer:
    """Builds the tokenizer of a GGUF file. Raises ModelTextError when its kind is not known."""
    keys = tokenizer_keys(metadata)
    if "tokens" not in keys:
        raise ModelTextError("the GGUF file carries no tokenizer (tokenizer.ggml.tokens is missing)")
    kind = keys.get("model")
    if kind not in _BUILDERS:
        known = " or ".join(_BUILDERS)
        raise ModelTextError(f"tokenizer.ggml.model={kind} is not supported: must be {known}")
    try:
        return _BUILDERS[kind](keys)
    except ModelTextError:
        raise
    except KeyError as error:
        raise ModelTextError(f"the GGUF file's tokenizer lacks tokenizer.ggml.{error.args[0]}") from error
    except Exception as error:  # tokenizers raises bare Exception for merges that do not fit
        raise ModelTextError(f"the GGUF file's tokenizer is damaged: {error}") from error


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
    return NexusTokenizer(backend, _vocabulary(keys, pieces, add_bos=pre in _BOS_FIRST, space_prefix=False))


def _sentencepiece(keys: Mapping[str, Any]) -> NexusTokenizer:
    tokens, space_prefix = keys["tokens"], bool(keys.get("add_space_prefix", True))
    unknown = tokens[special_id(keys, "unknown") or 0]
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
    control_ids = frozenset(i for i, kind in enumerate(keys.get("token_type") or []) if kind == _CONTROL)
    named = (special_id(keys, name) for name in ("eos", "eot", "eom"))
    spelt = (i for i in sorted(control_ids - {special_id(keys, "unknown")}) if keys["tokens"][i] in _ENDS)
    return Vocabulary(
        pieces=pieces,
        control_ids=control_ids,
        end_ids=tuple(dict.fromkeys(end for end in (*named, *spelt) if end is not None)),
        bos_id=special_id(keys, "bos"),
        add_bos=bool(keys.get("add_bos_token", add_bos)),
        space_prefix=space_prefix,
    )


def special_id(keys: Mapping[str, Any], name: str) -> int | None:
    """`keys`: those of the tokenizer, without their prefix. Some files name tokens that there are not."""
    token_id = keys.get(f"{name}_token_id")
    return token_id if isinstance(token_id, int) and 0 <= token_id < len(keys["tokens"]) else None


def tokenizer_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}


def _ids(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
