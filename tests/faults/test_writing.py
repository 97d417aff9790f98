"""An export that is killed or fails anywhere: the old one or the new one is there."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import Any

import pytest

from tests.faults.conftest import Desk
from tests.faults.export_once import REFUSED

KILLED = -signal.SIGKILL


@pytest.mark.timeout(3600)
def test_killed_before_and_after_each_call(desk: Desk, row: Any) -> None:
    calls = desk.calls()
    kinds = Counter(call.split()[0] for call in calls)
    assert kinds["fsync"] >= 6
    assert {"create", "write", "rename", "replace", "symlink", "mkdir"} <= kinds.keys()
    outcomes: dict[str, list[str]] = {}
    for at, call in enumerate(calls, start=1):
        modes = ["before", "after"]
        if call.startswith("write"):
            modes.append("half")
        for mode in modes:
            found = desk.trial(at=at, mode=mode)
            where = f"{mode} call {at}: {call}"
            assert found["code"] == KILLED, where
            assert found["half"] == [], where
            assert found["went_on"], (where, found["said"])
            assert found["left"] == [], where
            outcomes.setdefault(mode, []).append(found["outcome"])
    for mode, seen in outcomes.items():
        assert seen[0] == "old"
        # Once the new one is there, no later call takes it away again.
        assert seen == sorted(seen, reverse=True)
        count = Counter(seen)
        row(
            f"kill -9 {mode} each of {len(seen)} calls",
            f"old {count['old']}, new {count['new']}",
        )
    assert outcomes["after"][-1] == "new"


def test_the_trials_notice_a_half_export(desk: Desk) -> None:
    calls = desk.calls()
    outcomes = [
        desk.trial(at=at, mode="after", broken=True)["outcome"]
        for at in range(len(calls) // 2, len(calls))
    ]
    assert "half" in outcomes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EDQUOT", "EROFS"])
def test_each_call_fails_once(desk: Desk, row: Any, code: str) -> None:
    calls = desk.calls()
    seen: Counter[str] = Counter()
    for at, call in enumerate(calls, start=1):
        found = desk.trial(at=at, mode="error", errno=getattr(errno, code))
        where = f"{code} at call {at}: {call}"
        # Deleting what is old may fail without anybody's loss.
        assert found["code"] in (0, REFUSED), (where, found["said"])
        assert found["half"] == [], where
        assert found["went_on"], (where, found["said"])
        assert found["left"] == [], where
        seen[found["outcome"]] += 1
    assert seen["old"] and seen["new"]
    row(
        f"{code} from each of {len(calls)} calls",
        f"old {seen['old']}, new {seen['new']}",
    )


def test_a_limit_of_file_size(desk: Desk, row: Any) -> None:
    found = desk.trial(limit=2000)
    assert (found["code"], found["outcome"]) == (REFUSED, "old")
    assert found["half"] == [] and found["went_on"] and found["left"] == []
    assert "disk-full" in found["said"]
    row("EFBIG (RLIMIT_FSIZE)", found["outcome"])


def test_a_folder_that_cannot_be_written_to(desk: Desk, row: Any) -> None:
    """As root through the rights of nobody, who owns nothing here."""
    user = 65534 if os.getuid() == 0 else None
    if user is None:
        desk.template.chmod(0o555)
    try:
        found = desk.trial(user=user)
    finally:
        desk.template.chmod(0o755)
    assert (found["code"], found["outcome"]) == (REFUSED, "old"), found["said"]
    assert "output-unwritable" in found["said"]
    row("read-only output_dir", found["outcome"])


def test_a_umask_that_keeps_others_out(desk: Desk, row: Any) -> None:
    found = desk.trial(umask=0o077)
    assert (found["code"], found["outcome"]) == (0, "new")
    row("umask 077", found["outcome"])


def test_a_clock_that_goes_back(desk: Desk, row: Any) -> None:
    """The exports before are from tomorrow, for files and for the program."""
    files = [f / "spec_export_manifest.json" for f in desk.template.glob("step-*")]
    times = [file.stat().st_mtime for file in files]
    assert files
    for file, when in zip(files, times, strict=True):
        os.utime(file, (when + 86400, when + 86400))
    try:
        found = desk.trial(clock=86400.0)
    finally:
        for file, when in zip(files, times, strict=True):
            os.utime(file, (when, when))
    assert (found["code"], found["outcome"]) == (0, "new")
    assert found["half"] == [] and found["went_on"], found["said"]
    row("clock set back by a day", found["outcome"])
