"""Signals that come while the main thread works together with others."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def undisturbed() -> Iterator[list[BaseException]]:
    """Let what a signal's handler raises wait for the end of the block.

    A thread pool is not made for an exception at any place: one that comes in the
    instant in which a ``Condition`` was entered leaves it locked, and whoever needs
    it waits for ever. Handlers run at once, only what they raise waits; a signal
    without a handler in Python still ends the process. Other threads than the main
    one get no signals, so nothing is done there.

    Yields:
        What was raised so far: empty as long as the block may go on.

    Raises:
        BaseException: The first of them.
    """
    raised: list[BaseException] = []
    handlers: dict[int, Any] = {}

    def later(number: int, frame: Any) -> None:
        try:
            handlers[number](number, frame)
        except BaseException as problem:
            raised.append(problem)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, later)
        yield raised
    finally:
        for which, handler in handlers.items():
            signal.signal(which, handler)
        if raised:
            raise raised[0]
