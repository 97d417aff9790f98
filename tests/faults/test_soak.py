"""A minute of what ``python -m tests.faults.soak`` does for half an hour."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.soak import leaks, soak


@pytest.mark.timeout(3600)
def test_a_minute_of_signals_and_full_disks(row: Any) -> None:
    report = soak(1.0, seed=1)
    assert report.problems == []
    assert report.rounds >= 2
    assert report.exports >= 2
    row(
        f"soak: {report.rounds} trainings, {report.interrupted} interrupted",
        f"{report.exports} exports verified, {report.failures} refused by a full disk",
    )


def test_growth_is_noticed() -> None:
    flat = [(100.0, 3, 10)] * 20
    assert leaks(flat) == []
    assert len(leaks([(100.0 + 10 * i, 3 + i, 10 + i) for i in range(20)])) == 3
