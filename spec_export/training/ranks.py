"""Acting on rank 0 so that all ranks know what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from spec_export.artifact.signals import undisturbed
from spec_export.findings import Finding, SpecExportError
from spec_export.training.hook import INTERRUPTIONS

T = TypeVar("T")
_INTERRUPTED = "interrupted"
# A launcher signals one rank after the other.
SIGNAL_SECONDS = 1.0


def on_rank0(act: Callable[[], T]) -> T | None:
    """Run something on rank 0 and let every rank learn if it failed.

    Without this an error on rank 0 would leave the others in a barrier.

    Returns:
        What ``act`` returned on rank 0; None on the others.

    Raises:
        Exception: That of rank 0; on the others a copy of it.
    """
    result, _ = _told(act, lambda _result: None)
    return result


def agreed(act: Callable[[], bool]) -> bool:
    """Let rank 0 decide for all.

    Raises:
        Exception: As ``on_rank0``.
    """
    result, told = _told(act, lambda decision: decision)
    return bool(told if result is None else result)


def shared(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ):
        return value
    held = [value]
    with undisturbed():  # a broadcast is several collectives
        dist.broadcast_object_list(held, src=0)
    return held[0]


def settled(act: Callable[[], T]) -> Callable[[], T]:
    """Do something now on every rank; what it gives or raises comes when called.

    So that a rank on which it fails still takes part in what all ranks do next.
    """
    try:
        result = act()
    except INTERRUPTIONS:
        raise
    except Exception as caught:
        problem = caught

        def fail() -> T:
            raise problem

        return fail
    return lambda: result


def _told(act: Callable[[], T], of: Callable[[T], Any]) -> tuple[T | None, Any]:
    """What ``act`` returned on rank 0, and what the others are told of it."""
    if not (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ):
        return act(), None
    result: T | None = None
    problem: Exception | None = None
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result = act()
            told[1] = of(result)
        except Exception as caught:
            problem = caught
        # Also of a signal: the others wait here, and hear of theirs only afterwards.
        interrupted = isinstance(problem, INTERRUPTIONS)
        told[0] = _INTERRUPTED if interrupted else _portable(problem)
    with undisturbed():
        dist.broadcast_object_list(told, src=0)
    if problem is not None:
        raise problem
    if told[0] == _INTERRUPTED:
        time.sleep(SIGNAL_SECONDS)  # its own signal, if there is one, raises here
        raise INTERRUPTIONS[0]("rank 0 was interrupted")
    if told[0] is not None:
        findings, exit_code, text = told[0]
        raise (SpecExportError(findings, exit_code) if findings else RuntimeError(text))
    return result, told[1]


def _portable(problem: Exception | None) -> tuple[list[Finding], int, str] | None:
    """An error as plain data: not every exception survives pickling."""
    if problem is None:
        return None
    if isinstance(problem, SpecExportError):
        return problem.findings, problem.exit_code, str(problem)
    return [], 1, f"rank 0: {type(problem).__name__}: {problem}"
