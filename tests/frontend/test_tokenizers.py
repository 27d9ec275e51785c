"""Tokenizers and chat templates, against known ids and against the transformers library's results."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexuskv.v1 import engine_pb2
from services.frontend.active_request import Prompt
from services.frontend.http.completion_logprobs import prompt_entries
from services.frontend.served_model import load
from services.frontend.text import gguf_tokenizer, hub_tokenizer
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.detokenizer import Detokenizer, unfinished_tail
from services.frontend.text.errors import ModelTextError, TemplateError
from services.frontend.text.gguf_metadata import read_metadata
from services.frontend.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "tokenizer_vectors.json").read_text())["vectors"]
GOLDEN = json.loads((DATA / "greedy_golden.json").read_text())["cases"]
CORPUS = "The quick brown fox jumps over the lazy dog. Der schnelle braune Fuchs 2024, naïve café — 日本語!\n"


@pytest.mark.parametrize("vector", VECTORS, ids=[v["text"][:12] for v in VECTORS])
def test_vectors(tokenizer: Tokenizer, vector: dict[str, Any]) -> None:
    assert tokenizer.encode(vector["text"]) == vector["ids"]
    assert tokenizer.decode(vector["ids"]) == vector["text"]


def test_golden_prompts_and_outputs(info: engine_pb2.GetEngineInfoResponse) -> None:
    model = load(info)
    assert model.template is not None
    for case in GOLDEN:
        text = model.template.render([{"role": "user", "content": case["prompt"]}])
        assert model.tokenizer.encode(text) == case["prompt_token_ids"]
        assert model.tokenizer.decode(case["output_token_ids"]) == case["text"]
    assert model.tokenizer.vocabulary.end_ids == (2,)


# The default model has no tokens for some control characters and unassigned planes.
SPELLABLE = st.characters(min_codepoint=32, max_codepoint=0x1FFFF, exclude_categories=["Cs"])


@settings(max_examples=100, deadline=None)
@given(text=st.text(SPELLABLE, max_size=60))
def test_the_detokenizer_says_what_decode_says(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, skip_control=False)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert not detokenizer.holds_bytes


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=12), more=st.binary(max_size=4))
@example(data=b"\xed\xa0", more=b"\x80")
def test_an_unfinished_tail_is_never_a_character(data: bytes, more: bytes) -> None:
    tail = unfinished_tail(data)
    assert data.endswith(tail)
    assert len(tail) < 4
    if tail:
        with pytest.raises(UnicodeDecodeError):
            tail.decode()
    said = data[: len(data) - len(tail)].decode(errors="replace")
    assert said + (tail + more).decode(errors="replace") == (data + more).decode(errors="replace")


def test_invalid_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    byte = {tokenizer.pieces[i]: i for i in range(17, 17 + 256)}
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(byte[b"\xf0"]) == ""
    assert detokenizer.push(byte[b"a"]) == "\ufffda"


def test_token_text_of_a_part_of_a_character(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.pieces[i]: i for i in range(17, 17 + 256)}
    assert tokenizer.token_text(ids[b"\xf0"]) == "bytes:\\xf0"
    assert tokenizer.token_text(504) == "The"
    assert tokenizer.token_text(10**6) == ""


# GGUF


def test_damaged_gguf_files(tmp_path: Path, model_path: Path) -> None:
    whole = model_path.read_bytes()[:4_000_000]
    for name, data in {
        "empty": b"",
        "other": b"PK\x03\x04" + bytes(100),
        "short": whole[:1000],
        "version": b"GGUF" + struct.pack("<I", 9) + bytes(16),
        "cut": whole[:300_000],
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ModelTextError, match=name):
            read_metadata(path)
    with pytest.raises(ModelTextError, match="nowhere"):
        read_metadata(tmp_path / "nowhere")


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """A small vocabulary trained here, as a GGUF file would carry it."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|end|>"],
    )
    trained.train_from_iterator([CORPUS] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_byte_level_kinds_round_trip(pre: str) -> None:
    tokenizer = gguf_tokenizer.build(byte_level_metadata(pre))
    for text in (CORPUS, "a  b\n\n 123456 x=1.5 I'LL", "<|end|>x<|bos|>", "👩‍🚀", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
    assert tokenizer.encode("x<|end|>")[-1] == 1


@pytest.mark.parametrize(
    ("pre", "num_tokens"), [("gpt-2", 3), ("smollm", 6), ("llama-bpe", 2), ("qwen2", 6), ("default", 2)]
)
def test_kinds_cut_digits_as_they_should(pre: str, num_tokens: int) -> None:
    metadata = byte_level_metadata(pre)
    digits = [("7", "7"), ("77", "7"), ("777", "777")]
    metadata["tokenizer.ggml.tokens"] += [left + right for left, right in digits]
    metadata["tokenizer.ggml.merges"] += [f"{left} {right}" for left, right in digits]
    metadata["tokenizer.ggml.token_type"] += [1] * len(digits)
    tokenizer = gguf_tokenizer.build(metadata)
    assert len(tokenizer.encode("777777", add_bos=False)) == num_tokens


def test_exactly_one_bos_where_the_model_wants_one() -> None:
    wants = gguf_tokenizer.build(byte_level_metadata("llama-bpe"))
    assert wants.encode("fox")[0] == 0
    assert wants.encode("<|bos|>fox") == wants.encode("fox")
    assert wants.encode("fox", add_bos=False)[0] != 0
    assert wants.encode("") == [0]
    assert gguf_tokenizer.build(byte_level_metadata("gpt-2")).encode("fox")[0] != 0


def test_a_file_that_does_not_say_whether_it_wants_a_bos() -> None:
    for pre, wants in (("llama-bpe", True), ("qwen2", False)):
        metadata = byte_level_metadata(pre)
        del metadata["tokenizer.ggml.add_bos_token"]
        assert gguf_tokenizer.build(metadata).vocabulary.add_bos == wants


def test_ends_that_a_file_only_spells() -> None:
    metadata = byte_level_metadata("qwen2")
    metadata["tokenizer.ggml.tokens"] += ["<|endoftext|>", "<|im_end|>", "<|eot_id|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 1]
    size = len(metadata["tokenizer.ggml.tokens"])
    assert gguf_tokenizer.build(metadata).vocabulary.end_ids == (1, size - 3, size - 2)
    metadata["tokenizer.ggml.unknown_token_id"] = size - 3
    assert gguf_tokenizer.build(metadata).vocabulary.end_ids == (1, size - 2)


@pytest.mark.parametrize("token_id", [-1, 5000, 1 << 31])
def test_special_tokens_that_there_are_not(token_id: int) -> None:
    wrong = {f"tokenizer.ggml.{name}_token_id": token_id for name in ("bos", "eos", "eot", "unknown")}
    vocabulary = gguf_tokenizer.build({**sentencepiece_metadata(), **wrong}).vocabulary
    assert (vocabulary.bos_id, vocabulary.end_ids) == (None, ())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("merges", None, "lacks tokenizer.ggml.merges"),
        ("merges", ["x"], "damaged"),
        ("merges", ["nowhere to"], "damaged"),
        ("scores", None, "lacks tokenizer.ggml.scores"),
        ("token_type", [1], "damaged"),
    ],
)
def test_damaged_vocabularies_are_refused(key: str, value: Any, words: str) -> None:
    metadata = byte_level_metadata("gpt-2") if key == "merges" else sentencepiece_metadata()
    metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelTextError, match=words):
        gguf_tokenizer.build(metadata)


def test_kinds_that_are_not_known() -> None:
    with pytest.raises(ModelTextError, match="banana"):
        gguf_tokenizer.build(byte_level_metadata("banana"))
    with pytest.raises(ModelTextError, match="bert"):
        gguf_tokenizer.build({**byte_level_metadata("gpt-2"), "tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelTextError, match="no tokenizer"):
        gguf_tokenizer.build({})


def sentencepiece_metadata() -> dict[str, Any]:
    words = ["▁the", "▁fox", "▁", "th", "the", "fo", "fox", "▁t", "▁f", "▁th", "he", "▁fo"]
    letters = list("thefoxabc")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    scores = [0.0] * 3 + [0.0] * 256 + [-100.0] * len(letters) + [-float(i + 1) for i in range(len(words))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(words)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece() -> None:
    tokenizer = gguf_tokenizer.build(sentencepiece_metadata())
    ids = tokenizer.encode("the fox 日")
    assert ids[0] == 1
    assert [tokenizer.token_text(i) for i in ids[1:4]] == [" the", " fox", " "]
    assert tokenizer.decode_bytes(ids[4:]) == "日".encode()
    assert tokenizer.decode(ids[1:]) == "the fox 日"
    assert tokenizer.encode("the</s>")[-1] == 2
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(i) for i in tokenizer.encode("fox", add_bos=False)) == " fox"


# Model directories


def write_directory(path: Path, **config: Any) -> None:
    metadata = byte_level_metadata("gpt-2")
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_model_directory(tmp_path: Path) -> None:
    write_directory(tmp_path, chat_template="{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 8}')
    model = load(engine_pb2.GetEngineInfoResponse(model="m", model_path=str(tmp_path)))
    assert model.tokenizer.vocabulary.end_ids == (7, 1, 8)
    assert model.template is not None
    text = model.template.render([{"role": "user", "content": CORPUS}])
    ids = model.tokenizer.encode(text)
    assert (ids[0], ids[1] == 0, ids[-1]) == (0, False, 1)
    assert model.tokenizer.decode(ids) == f"<|bos|>{CORPUS}<|end|>"
    assert model.tokenizer.encode("fox")[0] == 0


def test_templates_of_a_directory(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    write_directory(tmp_path, chat_template=named)
    info = engine_pb2.GetEngineInfoResponse(model="m", model_path=str(tmp_path))
    model = load(info)
    assert model.template is not None
    assert model.template.render([]) == "y"
    (tmp_path / "chat_template.jinja").write_text("z")
    model = load(info)
    assert model.template is not None
    assert model.template.render([]) == "z"
    (tmp_path / "chat_template.jinja").unlink()
    write_directory(tmp_path)
    assert load(info).template is None


def test_what_a_training_script_had_set_is_not_for_prompts(tmp_path: Path) -> None:
    write_directory(tmp_path)
    whole = hub_tokenizer.load(tmp_path).encode(CORPUS)
    file = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.enable_truncation(8)
    backend.enable_padding(length=512)
    backend.save(str(file))
    assert hub_tokenizer.load(tmp_path).encode(CORPUS) == whole
    assert 8 < len(whole) < 512


def test_a_model_without_a_usable_template_completes_text(tmp_path: Path) -> None:
    write_directory(tmp_path, chat_template="{% if %}")
    model = load(engine_pb2.GetEngineInfoResponse(model="m", model_path=str(tmp_path)))
    assert model.template is None
    assert model.tokenizer.encode("fox")


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelTextError, match=r"tokenizer\.json"):
        hub_tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelTextError, match=r"tokenizer\.json"):
        hub_tokenizer.load(tmp_path)
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelTextError, match="byte-level"):
        hub_tokenizer.load(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelTextError, match="tokenizer_config"):
        hub_tokenizer.load(tmp_path)


# Chat templates


def test_templates_have_what_transformers_gives_them() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n{% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m.content | tojson }}\n{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
        "{% if tools is none %}!{% endif %}",
        {"eos_token": "</s>"},
    )
    assert template.render([{"role": "skip"}, {"role": "user", "content": "<é>"}]) == '"<é>"\n4</s>!'


def test_what_training_marks_is_text() -> None:
    template = ChatTemplate("a{% generation %}{{ messages[0].content }}{% endgeneration %}c", {})
    assert template.render([{"role": "user", "content": "b"}]) == "abc"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role here') }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_that_refuse(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(ModelTextError, match="does not parse"):
        ChatTemplate("{% if %}", {})


def test_offsets_of_an_echoed_prompt_leave_out_what_the_tokenizer_added() -> None:
    tokenizer = gguf_tokenizer.build(byte_level_metadata("llama-bpe"))
    text = "fox dog 2024"
    prompt = Prompt(tokenizer.encode(text), text)
    bos, *entries = prompt_entries(prompt, text, [], tokenizer)
    assert (bos.token_id, bos.offset) == (0, 0)
    for entry in entries:
        assert text[entry.offset :].startswith(tokenizer.token_text(entry.token_id))
    assert sum(len(tokenizer.token_text(entry.token_id)) for entry in entries) == len(text)
