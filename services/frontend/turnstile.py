"""Fairness on one event loop: a burst of requests is prepared one per turn, so that others get theirs."""

import asyncio
from collections import deque


class Turnstile:
    """Preparing a request (parsing, rendering, tokenizing) takes about a millisecond of the loop.

    Without this, a thousand that arrive together would keep it from everything else for a second.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def wait(self) -> None:
        """Returns when it is the caller's turn; one caller per turn of the event loop, first come first."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a caller that was cancelled has gone
                turn.set_result(None)
                break
        self._is_turning = bool(self._waiting)
        if self._is_turning:
            loop.call_soon(self._turn, loop)
