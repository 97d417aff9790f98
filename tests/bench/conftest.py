"""Options of the benchmark and the table that ends it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROWS: list[str] = []


@pytest.fixture(scope="session")
def size() -> str:
    """``SPEC_EXPORT_BENCH`` says how large: 0.1B, 0.3B or 1.1B parameters."""
    return os.environ.get("SPEC_EXPORT_BENCH", "0.1B")


@pytest.fixture(scope="session")
def rounds() -> int:
    """How often each side is measured, ``SPEC_EXPORT_BENCH_ROUNDS``."""
    return int(os.environ.get("SPEC_EXPORT_BENCH_ROUNDS", "5"))


@pytest.fixture(scope="session")
def files(size: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.bench.workload import make_files

    yield make_files(tmp_path_factory.mktemp("bench"), size)


def timed(act: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def said(values: list[float]) -> str:
    """Median and range in milliseconds."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle * 1e3:.0f} ms [{low * 1e3:.0f} .. {high * 1e3:.0f}]"


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the quotients of neighbouring measurements."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def row() -> Callable[[str], None]:
    """Add a line to the table."""
    return ROWS.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if ROWS:
        terminalreporter.section("measured")
        for line in ROWS:
            terminalreporter.write_line(line)


def drop(path: Path) -> None:
    """Remove a folder if it is there."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
