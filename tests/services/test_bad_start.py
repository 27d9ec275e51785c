"""What cannot start says why in one sentence and exits non-zero."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.weights.load import open_checkpoint
from services.cli import main
from tests.engine.test_families import make_model

# Runs `nexuskv ARGUMENTS` in this process, which must fail with a sentence that has all the words.
Refused = Callable[..., None]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    def run(*arguments: str, words: tuple[str, ...]) -> None:
        assert main(arguments) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        sentence = captured.err.strip().splitlines()[-1]
        for word in words:
            assert word in sentence

    return run


def test_unknown_model(refused: Refused) -> None:
    refused("engine", "--model", "gpt-17", words=("gpt-17", "smollm2-135m-instruct"))


def test_a_draft_model_with_another_vocabulary(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    make_model(tmp_path, "llama")
    refused("engine", "--draft-model", str(tmp_path), words=(tmp_path.name, "smollm2", "vocabulary"))


def test_missing_file(refused: Refused) -> None:
    refused("engine", "--model", "/nowhere/model.gguf", words=("/nowhere/model.gguf", "not exist"))


@pytest.mark.parametrize("kept", [2, 1000, 3_000_000])
def test_truncated_gguf(tmp_path: Path, kept: int, refused: Refused) -> None:
    whole = open_checkpoint("smollm2-135m-instruct").path
    short = tmp_path / "short.gguf"
    with whole.open("rb") as file:
        short.write_bytes(file.read(kept))
    refused("engine", "--model", str(short), words=("short.gguf",))


def test_a_port_that_is_none(refused: Refused) -> None:
    refused("frontend", "--http-port", "99999", words=("--http-port=99999", "65535"))


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_port_in_use(option: str, refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        other = "--grpc-port" if option == "--http-port" else "--http-port"
        refused("up", option, port, other, "0", words=(option, port, "in use"))


def test_a_wrong_value_names_its_key(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("engine", "--kv-blocks", "many", words=("--kv-blocks=many", "integer"))
    refused("engine", "--dtype", "int3", words=("--dtype=int3", "bfloat16"))
    monkeypatch.setenv("NEXUSKV_MAX_NUM_SEQS", "0")
    refused("engine", words=("NEXUSKV_MAX_NUM_SEQS=0", "from 1 to 4096"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none(refused: Refused) -> None:
    refused("engine", "--device", "cuda", words=("--device cuda", "no CUDA GPU can be used"))


def test_a_context_longer_than_the_model_has(refused: Refused) -> None:
    refused("engine", "--max-model-len", "9000", words=("9000", "8192"))
