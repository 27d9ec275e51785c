"""One client request while it runs: one generation per prompt, read as one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import NamedTuple

from services.errors import ServiceError
from services.frontend.generation import Generation, cancelled
from services.frontend.metrics import RequestMetrics
from services.frontend.outputs import Delta, Usage


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None = None  # as the client wrote it, when it wrote text


class ActiveRequest:
    """A context manager: leaving it, by whatever way, aborts what is still running."""

    def __init__(
        self,
        request_id: str,
        generations: list[Generation],
        wake: asyncio.Event,
        metrics: RequestMetrics,
        release: Callable[["ActiveRequest"], None],
    ) -> None:
        self.request_id = request_id
        self.generations = generations
        self._wake = wake
        self._metrics = metrics
        self._release = release
        self._left = False

    def __enter__(self) -> "ActiveRequest":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    @property
    def usage(self) -> Usage:
        total = Usage()
        for generation in self.generations:
            total.add(generation.usage)
        return total

    def fail(self, error: ServiceError) -> None:
        for generation in self.generations:
            generation.fail(error)

    def cancel(self) -> None:
        """Whatever still runs ends: the client has its answer or an error, or is gone. Idempotent."""
        if self._left:
            return
        self._left = True
        self.fail(self._error() or cancelled())
        if (error := self._error()) is not None:
            self._metrics.failed(error)
        self._release(self)

    def abort(self) -> None:
        """Every unfinished choice ends with ABORT."""
        for generation in self.generations:
            generation.abort()

    async def accepted(self) -> None:
        """Returns when the engine has taken every prompt. Raises ServiceError when it refuses one."""
        while not all(g.accepted or g.done for g in self.generations) or self._error():
            self._raise_error()
            await self._wait()

    async def finished(self) -> list[Delta]:
        """The whole answer, one delta per choice, in order. Raises ServiceError."""
        while not all(g.done for g in self.generations) or self._error():
            self._raise_error()
            await self._wait()
        return self._take()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, again and again, until every choice has finished. Raises ServiceError."""
        self._wake.set()  # what came before this call is news too
        while True:
            await self._wait()
            done = all(g.done for g in self.generations)
            if news := self._take():
                yield news
            self._raise_error()
            if done:
                return

    async def _wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def _take(self) -> list[Delta]:
        return [delta for generation in self.generations for delta in generation.take()]

    def _error(self) -> ServiceError | None:
        return next((g.error for g in self.generations if g.error is not None), None)

    def _raise_error(self) -> None:
        if (error := self._error()) is not None:
            raise error
