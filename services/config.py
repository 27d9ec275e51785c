"""Configuration: frozen dataclasses; command line and environment are derived from them.

A field made by `option` becomes `--its-name` and `NEXUSKV_ITS_NAME`. The command line wins over the
environment, the environment over the default. A wrong value raises ConfigError, which names the key, the
value and what is allowed.
"""

import argparse
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

ENV_PREFIX = "NEXUSKV_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ConfigError(Exception):
    """A setting has a value that is not allowed; the message is for the person who set it."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    positional: str | None = None,
) -> Any:
    """A dataclass field that is a command line option and an environment variable.

    `positional` is what a field that must be given, without a name, is called in the help.
    """
    metadata = dict(help=help, choices=choices, minimum=minimum, maximum=maximum, positional=positional)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class CommonConfig:
    """What every process has."""

    log_level: str = option(
        "info", "least severe log message that is shown", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class MemoryManagerConfig(CommonConfig):
    memory_listen: str = option(
        "127.0.0.1:50052", "address the memory manager serves on; under `up` a free port unless it is given"
    )
    lease_ms: int = option(10_000, "an engine silent for this long loses its blocks", minimum=100)
    journal: str = option(
        "auto",
        "directory of the journal, from which a restarted memory manager goes on; "
        "auto: in the user's state directory; off: no token is kept on disk",
    )
    journal_repair: bool = option(False, "cut a damaged journal before its first damaged record and start")
    fsync: str = option(
        "interval", "when the disk must have what the journal says", choices=("always", "interval", "never")
    )
    draft_index_tokens: int = option(
        1 << 20, "tokens of past prompts and outputs that are kept to draft from; 0: none", minimum=0
    )
    tenant_limits: str = option(
        "", "TOML file: [TENANT] quota, floor, pin_cap, in blocks of each engine's pool"
    )


@dataclass(frozen=True)
class EngineConfig(CommonConfig):
    engine_listen: str = option(
        "127.0.0.1:50053", "address the engine serves on; under `up` a free port unless it is given"
    )
    memory_address: str = option("127.0.0.1:50052", "where the memory manager is")
    engine_id: str = option("engine-0", "names this engine; a restarted engine keeps it")
    model: str = option(
        "smollm2-135m-instruct", "name of the default model, a directory, a .gguf file or a hub id"
    )
    served_model_name: str = option("", "name clients use; default: derived from --model")
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "bfloat16", "compute type of weights and KV cache", choices=("bfloat16", "float16", "float32")
    )
    weights: str = option(
        "auto",
        "matrices of the compute type, or on a CPU of 8 bits or fewer; auto: on a CPU of as few bits as "
        "a GGUF file has, and computed as exactly as the compute type",
        choices=("auto", "dtype", "int8"),
    )
    max_model_len: int = option(0, "longest sequence in tokens; 0: the model's context length", minimum=0)
    kv_blocks: int = option(0, "blocks of 16 tokens in the KV pool; 0: from the device's memory", minimum=0)
    kv_memory_fraction: float = option(
        0.25, "on a CPU: share of the free memory the KV pool takes when --kv-blocks is 0",
        minimum=0.01, maximum=0.95,
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "on a GPU: share of its memory that weights and KV pool take when --kv-blocks is 0",
        minimum=0.01, maximum=0.99,
    )  # fmt: skip
    max_num_seqs: int = option(64, "sequences that run at once", minimum=1, maximum=4096)
    max_num_batched_tokens: int = option(512, "tokens computed in one step", minimum=16, maximum=65536)
    max_waiting: int = option(2048, "requests that may wait; one more is refused", minimum=1)
    speculation: str = option("on", "draft tokens and verify them", choices=("on", "off"))
    draft_branches: int = option(
        1, "continuations drafted where a sequence has gone on in several ways before", minimum=1, maximum=4
    )
    draft_model: str = option(
        "", "smaller model with the same tokenizer that drafts tokens; named as --model is; default: none"
    )
    num_threads: int = option(0, "compute threads; 0: one per core", minimum=0)


@dataclass(frozen=True)
class FrontendConfig(CommonConfig):
    host: str = option("127.0.0.1", "interface both doors bind to")
    http_port: int = option(8080, "port of the OpenAI HTTP API; 0: any free one", minimum=0, maximum=65535)
    grpc_port: int = option(50051, "port of InferenceService; 0: any free one", minimum=0, maximum=65535)
    memory_address: str = option("127.0.0.1:50052", "where the memory manager is")
    engine_address: str = option("127.0.0.1:50053", "where the engine is")
    drain_timeout_s: float = option(
        30.0, "seconds that running streams get to finish after SIGTERM", minimum=0
    )
    max_body_bytes: int = option(8 << 20, "largest request body", minimum=1024)


@dataclass(frozen=True)
class BlocksConfig(CommonConfig):
    memory_address: str = option("127.0.0.1:50052", "where the memory manager is")
    engine_id: str = option("", "whose blocks; may be left out when there is one engine")


@dataclass(frozen=True)
class ExplainConfig(BlocksConfig):
    sequence_id: int = option(
        0, "one of an answer's `usage.nexuskv.sequence_ids`", positional="ID", minimum=1
    )
    administrator: bool = option(False, "name other tenants too")


@dataclass(frozen=True)
class ReplayConfig(CommonConfig):
    journal: str = option("", "a journal file, or the directory of a journal", positional="JOURNAL")
    blocks: int = option(0, "blocks of the pool; 0: as many as when it was written", minimum=0)
    policy: str = option("lru", "which cached block goes first", choices=("lru", "fifo"))
    plot: str = option("miss-ratio.png", "where the miss-ratio curve is drawn")


Config = TypeVar("Config", bound=CommonConfig)


def add_arguments(
    parser: argparse.ArgumentParser, config_classes: Iterable[type[CommonConfig]], without: Iterable[str] = ()
) -> None:
    """One option per field; fields that several classes share become one option."""
    seen = set(without)
    for cls in config_classes:
        for f in fields(cls):
            if f.name in seen:
                continue
            seen.add(f.name)
            if f.metadata["positional"]:
                parser.add_argument(f.name, metavar=f.metadata["positional"], help=f.metadata["help"])
                continue
            shown = "" if f.default in ("", None) else f" (default: {f.default})"
            flag = "--" + f.name.replace("_", "-")
            # An option that is true or false may stand alone.
            alone: dict[str, str] = {"nargs": "?", "const": "true"} if f.type is bool else {}
            parser.add_argument(flag, dest=f.name, default=None, help=f.metadata["help"] + shown, **alone)  # type: ignore[arg-type]


def load(cls: type[Config], arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Builds one config from parsed arguments and the environment. Raises ConfigError."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in fields(cls):
        text, key = arguments.get(f.name), f.metadata["positional"] or "--" + f.name.replace("_", "-")
        if text is None:
            key = ENV_PREFIX + f.name.upper()
            text = environ.get(key)
        if text is not None:
            values[f.name] = _parse(key, str(text), hints[f.name], f)
    return cls(**values)


def to_environment(config: CommonConfig) -> dict[str, str]:
    """The environment from which `load` builds an equal config (how `up` configures its children)."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {ENV_PREFIX + name.upper(): str(value) for name, value in values.items() if value is not None}


def _parse(key: str, text: str, hint: Any, f: "Field[Any]") -> Any:
    kind = _without_none(hint)
    meta = f.metadata
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{key}={text}: must be true or false")
    if kind is str:
        if meta["choices"] and text not in meta["choices"]:
            raise ConfigError(f"{key}={text}: must be one of {', '.join(meta['choices'])}")
        return text
    allowed = ("an integer" if kind is int else "a number") + _range_text(meta["minimum"], meta["maximum"])
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{key}={text}: must be {allowed}") from None
    low, high = meta["minimum"], meta["maximum"]
    if value != value or (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"{key}={text}: must be {allowed}")
    return value


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(arm for arm in hint.__args__ if arm is not type(None))
    return hint


def _range_text(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"
