"""The `nexuskv` command."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from services.config import (
    BlocksConfig,
    CommonConfig,
    ConfigError,
    EngineConfig,
    ExplainConfig,
    FrontendConfig,
    MemoryManagerConfig,
    ReplayConfig,
    add_arguments,
    load,
)
from services.startup import CommandError

_COMMANDS: dict[str, tuple[str, tuple[type[CommonConfig], ...]]] = {
    "up": (
        "start memory manager, engine and frontend here, restart what dies; Ctrl-C drains",
        (FrontendConfig, EngineConfig, MemoryManagerConfig),
    ),
    "memory-manager": ("one memory manager", (MemoryManagerConfig,)),
    "engine": ("one engine", (EngineConfig,)),
    "frontend": ("one frontend", (FrontendConfig,)),
    "explain": ("why a sequence hit or missed the cache", (ExplainConfig,)),
    "blocks": ("who has how much of an engine's pool", (BlocksConfig,)),
    "replay": ("hit rates of a journal's requests with other pools", (ReplayConfig,)),
}
# Where all processes are here, these follow from where they serve.
_FOLLOWING = ("memory_address", "engine_address")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(arguments.command)) as runner:
            runner.run(_run(arguments.command, vars(arguments), os.environ))
    except (ConfigError, CommandError) as error:
        print(f"nexuskv {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(command: str, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Coroutine[Any, Any, None]:
    """Imports only what the command needs: the client's machine has no torch."""
    logging.basicConfig(
        level=load(CommonConfig, arguments, environ).log_level.upper(),
        format=f"%(asctime)s %(levelname)s {command} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if command == "memory-manager":
        from services.memory.process import run_memory_manager

        return run_memory_manager(
            load(MemoryManagerConfig, arguments, environ), lambda address: _say_ready(f"memory={address}")
        )
    if command == "engine":
        from services.engine.process import run_engine

        return run_engine(
            load(EngineConfig, arguments, environ), lambda address: _say_ready(f"engine={address}")
        )
    if command == "frontend":
        from services.frontend.process import run_frontend

        return run_frontend(
            load(FrontendConfig, arguments, environ),
            lambda at: _say_ready(f"http={at.http} grpc={at.grpc} model={at.model}"),
        )
    if command == "explain":
        from services.memory_tools import explain

        return explain(load(ExplainConfig, arguments, environ), print)
    if command == "blocks":
        from services.memory_tools import show_blocks

        return show_blocks(load(BlocksConfig, arguments, environ), print)
    if command == "replay":
        from services.replay import run_replay

        return run_replay(load(ReplayConfig, arguments, environ), print)
    from services.supervisor import SystemConfig, run_system

    return run_system(SystemConfig.load(arguments, environ), lambda line: print(line, flush=True))


def _loop_factory(command: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The frontend moves a message per token and stream: a quicker loop saves it a quarter of its time."""
    if command != "frontend":
        return None
    import uvloop

    return uvloop.new_event_loop


def _say_ready(what: str) -> None:
    print(f"ready {what}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nexuskv",
        description="LLM serving with a memory manager of its own. "
        "Every option can also be an environment variable: --http-port is NEXUSKV_HTTP_PORT.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_text, config_classes) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_arguments(command, config_classes, without=_FOLLOWING if name == "up" else ())
    return parser


if __name__ == "__main__":
    sys.exit(main())
