"""The engine's thread: commands come in through a queue, a step's outputs go out to the sessions."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from engine.engine import Engine
from engine.errors import RequestError
from engine.outputs import SequenceOutput
from engine.sequence import Request

logger = logging.getLogger(__name__)

# How often an idle engine looks whether the memory manager still knows it.
IDLE_CHECK_S = 0.5

T = TypeVar("T")
Decided = Callable[[RequestError | None], None]


@dataclass(frozen=True)
class _Submit:
    request: Request
    on_decided: Decided


@dataclass(frozen=True)
class _Abort:
    request_ids: list[str]
    index: int | None  # of the one choice that is to end
    asked_at: float = field(default_factory=time.monotonic)


class EngineWorker:
    """Runs an engine in a thread of its own. Callbacks are called on the event loop, outputs once a step."""

    def __init__(self, engine: Engine, on_outputs: Callable[[list[SequenceOutput]], None]) -> None:
        self.engine = engine
        self._on_outputs = on_outputs
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[_Submit | _Abort | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine")
        self.died: asyncio.Future[BaseException] = self._loop.create_future()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, on_decided: Decided) -> None:
        """`on_decided` hears None when the request was accepted, else why not."""
        self._commands.put(_Submit(request, on_decided))

    def abort(self, request_ids: list[str], index: int | None = None) -> None:
        """Of every choice, or of the one with that index."""
        self._commands.put(_Abort(request_ids, index))

    async def stop(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self.engine.step() if self.engine.has_work else []
                if outputs:
                    self._post(self._on_outputs, outputs)
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._post(self._note_death, error)

    def _obey(self) -> bool:
        """Carries out what was asked for since the last step; False to stop. Waits when there is no work."""
        wait_s = 0.0 if self.engine.has_work else IDLE_CHECK_S
        try:
            command = self._commands.get(block=wait_s > 0, timeout=wait_s)
            while command is not None:
                self._carry_out(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _carry_out(self, command: _Submit | _Abort) -> None:
        if isinstance(command, _Abort):
            for request_id in command.request_ids:
                self.engine.abort(request_id, command.asked_at, command.index)
            return
        try:
            self.engine.add(command.request)
        except RequestError as error:
            self._post(command.on_decided, error)
        else:
            self._post(command.on_decided, None)

    def _note_death(self, error: BaseException) -> None:
        if not self.died.done():
            self.died.set_result(error)

    def _post(self, callback: Callable[[T], None], value: T) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, value)
        except RuntimeError:
            logger.debug("the event loop is closed; a callback is dropped")
