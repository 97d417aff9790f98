"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Hear Ctrl-C: a script's background job ignores it, and so do its children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
