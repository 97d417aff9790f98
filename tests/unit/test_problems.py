"""What is kept of failures while a training goes on for days."""

from __future__ import annotations

import gc
import weakref

from spec_export.training.problems import KEPT, Problems


class Weights:
    """Something large that a function had when it failed."""


def failure() -> tuple[Exception, weakref.ref[Weights]]:
    """An exception with another one behind it, and what both passed by."""

    def inner(weights: Weights) -> None:
        raise OSError("no space")

    def outer() -> weakref.ref[Weights]:
        weights = Weights()
        seen.append(weakref.ref(weights))
        try:
            inner(weights)
        except OSError as problem:
            raise ValueError("not written") from problem

    seen: list[weakref.ref[Weights]] = []
    try:
        outer()
    except ValueError as problem:
        return problem, seen[0]
    raise AssertionError


def test_a_failure_holds_no_weights() -> None:
    problem, weights = failure()
    gc.collect()
    assert weights() is not None  # a traceback does
    problems = Problems()
    assert problems.add(problem)
    gc.collect()
    assert weights() is None
    assert not problems.add(problem)
    assert list(problems.newest) == [problem]


def test_the_same_failure_again_is_news() -> None:
    """A resume that counts steps anew fails at the step of an earlier process."""
    problems = Problems()
    problems.take_over([{"step": 2, "message": "OSError: full", "best": False}], 0)
    problems.made_good(problems.open(-1), 1)
    assert problems.open(-1) == []
    problems.note(2, "OSError: full")
    assert {note.step for note in problems.open(-1)} == {2}


def test_only_the_newest_are_kept() -> None:
    problems = Problems()
    for number in range(2 * KEPT):
        problems.add(ValueError(number))
    assert [p.args for p in problems.newest] == [(n,) for n in range(KEPT, 2 * KEPT)]
