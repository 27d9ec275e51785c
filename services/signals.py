"""Waiting to be told to stop."""

import asyncio
import os
import signal
import sys

# Set for processes that must not outlive their supervisor: their standard input is a pipe that it holds.
SUPERVISED = "NEXUSKV_SUPERVISED"


async def wait_for_signal() -> None:
    """Returns at the first SIGTERM or SIGINT, or when the supervisor is gone."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    supervised = SUPERVISED in os.environ
    if supervised:
        # Nobody writes to the pipe: it becomes readable when its other end is closed.
        loop.add_reader(sys.stdin.fileno(), told.set)
    try:
        await told.wait()
    finally:
        if supervised:
            loop.remove_reader(sys.stdin.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
