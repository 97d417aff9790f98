"""A ``finalize`` that is killed or fails anywhere: what was there or what was asked."""

from __future__ import annotations

import errno
from collections import Counter
from typing import Any

import pytest

from tests.faults.conftest import Desk
from tests.faults.export_once import REFUSED
from tests.faults.test_writing import KILLED

NAMES = {
    "finish": "finalize in place",
    "again": "finalize in place, once more",
    "copy": "finalize --force, a saved export",
    "replace": "finalize --force, a checkpoint",
}
IN_PLACE = ("finish", "again")
KILLS = [
    # After a call is before the next one, but for what our shim does not see.
    pytest.param(act, mode, marks=wide)
    for act in NAMES
    for mode in ("before", "after", "half")
    for wide in [[pytest.mark.wide] if mode == "after" and act not in IN_PLACE else []]
]
ERRORS = [
    # The two differ in nothing but what the user is told.
    pytest.param(act, code, marks=wide)
    for act in (*NAMES, "new")
    for code in ("EIO", "ENOSPC")
    for wide in [[pytest.mark.wide] if code != "EIO" and act not in IN_PLACE else []]
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("act", "mode"), KILLS)
def test_killed_at_each_call(desk: Desk, row: Any, act: str, mode: str) -> None:
    calls = desk.calls(act=act)
    kinds = Counter(call.split()[0] for call in calls)
    assert {"create", "write", "fsync"} <= kinds.keys()
    seen = []
    for at, call in enumerate(calls, start=1):
        if mode == "half" and not call.startswith("write"):
            continue
        found = desk.trial(act=act, at=at, mode=mode)
        where = f"{mode} call {at}: {call}"
        assert found["code"] == KILLED, where
        assert found["half"] == [], where
        assert found["went_on"], (where, found["said"])
        assert found["left"] == [], where
        seen.append(found["outcome"])
    assert seen[0] == "old"
    assert seen == sorted(seen, reverse=True)
    assert (seen[-1] == "new") == (mode != "half")
    count = Counter(seen)
    row(
        f"{NAMES[act]}: kill -9 {mode} each of {len(seen)} calls",
        f"old {count['old']}, new {count['new']}",
    )


def test_the_trials_notice_a_card_that_the_manifest_does_not_know(desk: Desk) -> None:
    """Written in the order that comes to mind first: the control of those in place."""
    calls = desk.calls(act="again", broken=True)
    found = [
        desk.trial(act="again", at=at, mode="before", broken=True)
        for at in range(1, len(calls) + 1)
    ]
    torn = [f for f in found if f["half"] == ["final"]]
    assert torn
    assert not any(f["went_on"] for f in torn)


@pytest.mark.timeout(3600)
def test_killed_where_two_names_cannot_be_exchanged(desk: Desk, row: Any) -> None:
    """Only between two renames is the old export hidden; it gets its name back."""
    calls = desk.calls(act="exchange")
    first = next(n for n, c in enumerate(calls, 1) if c.startswith("rename .old-"))
    seen: Counter[str] = Counter()
    for at in range(first, len(calls) + 1):
        found = desk.trial(act="exchange", at=at, mode="before")
        assert found["half"] == (["no final"] if at == first + 1 else [])
        assert found["went_on"], (calls[at - 1], found["said"])
        assert found["left"] == [], calls[at - 1]
        seen[found["outcome"]] += 1
        failed = desk.trial(act="exchange", at=at, mode="error", errno=errno.EIO)
        assert failed["half"] == [] and failed["went_on"], calls[at - 1]
        assert failed["outcome"] == ("old" if failed["code"] == REFUSED else "new")
    assert (seen["old"], seen["half"]) == (1, 1)
    row(
        f"finalize --force, no exchange: kill -9 before {seen.total()} calls",
        f"old {seen['old']}, hidden and given back 1, new {seen['new']}",
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("act", "code"), ERRORS)
def test_each_call_fails_once(desk: Desk, row: Any, act: str, code: str) -> None:
    calls = desk.calls(act=act)
    seen: Counter[str] = Counter()
    for at, call in enumerate(calls, start=1):
        found = desk.trial(act=act, at=at, mode="error", errno=getattr(errno, code))
        where = f"{code} at call {at}: {call}"
        assert found["code"] in (0, REFUSED), (where, found["said"])
        assert found["half"] == [], where
        if found["code"] == REFUSED and act not in IN_PLACE:
            assert found["outcome"] == "old", where
        assert found["went_on"], (where, found["said"])
        assert found["left"] == [], where
        seen[found["outcome"]] += 1
    assert seen["old"] and seen["new"]
    name = NAMES.get(act, "finalize")
    row(
        f"{name}: {code} from each of {len(calls)} calls",
        f"old {seen['old']}, new {seen['new']}",
    )
