"""The desk where drafts are handed in, and the table of what became of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.field.desk import Desk, Row

ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices of eight columns are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Desk:
    """T0 at ``desk.target`` and everything to hand drafts in."""
    return Desk(tmp_path, request.config.stash.setdefault(ROWS, []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print case, outcome, exit code and subject of everything handed in."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("field cases")
    width = max(len(row.case) for row in rows)
    for row in sorted(rows, key=Row.order):
        terminalreporter.write_line(
            f"{row.case:<{width}}  {row.outcome:<4}  {row.code}  {row.subject}"
        )
