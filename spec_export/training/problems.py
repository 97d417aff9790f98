"""What went wrong with exports while the training went on."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

from spec_export.artifact.publish import step_name
from spec_export.findings import Finding, warning

KEPT = 100  # exceptions


@dataclass(frozen=True)
class Note:
    """Why the export of a step is not there.

    Attributes:
        step: It.
        message: Why.
        by: The process that is writing it; what is said holds once that is gone.
    """

    step: int
    message: str
    by: str | None = None


class Problems:
    """Failures of a run, kept until a later export has recorded them.

    Used by the thread of the training and by that which writes.

    Attributes:
        newest: The last exceptions, without the values of the functions that they
            left: those may be weights.
    """

    def __init__(self) -> None:
        self.newest: deque[Exception] = deque(maxlen=KEPT)
        self._unraised: list[Exception] = []
        self._notes: list[Note] = []
        self._told: set[Note] = set()
        self._lock = threading.Lock()

    def add(self, problem: Exception, *, unraised: bool = False) -> bool:
        """Keep an exception.

        Args:
            problem: It.
            unraised: The training has not seen it yet.

        Returns:
            False if it was there already.
        """
        with self._lock:
            if any(problem is known for known in self.newest):
                return False
            self.newest.append(_light(problem))
            if unraised:
                self._unraised.append(problem)
            return True

    def unraised(self) -> Exception | None:
        """What the training has not seen yet; it has now."""
        with self._lock:
            found = self._unraised[0] if self._unraised else None
            self._unraised.clear()
            return found

    def take_over(self, failed: list[dict[str, Any]], step: int) -> int:
        """Go on with what ``as_state`` of an earlier process says.

        Args:
            failed: It.
            step: Where the training is; steps beyond it are counted anew (as after
                ``--save-best``), and later ones of the same number are others.

        Returns:
            The step of the best weights if their export failed, else -1.
        """
        for one in failed:
            self.note(one["step"], one["message"])
        best = [f["step"] for f in failed if f["best"] and f["step"] <= step]
        return max(best, default=-1)

    def note(self, step: int, message: str) -> None:
        """Something that the next manifest and ``finalize`` have to say."""
        with self._lock:
            note = Note(step, " ".join(message.split()))
            self._told.discard(note)  # it happened again
            self._notes.append(note)

    def open(self, best_step: int) -> list[Note]:
        """What no later export has recorded.

        What failed for the best weights stays open: ``best`` names older ones.
        """
        with self._lock:
            return [
                n for n in self._notes if n not in self._told or n.step == best_step
            ]

    def made_good(self, told: list[Note], step: int) -> None:
        """An export of this step is there, and its manifest tells of these."""
        with self._lock:
            self._told |= set(told)
            self._notes = [n for n in self._notes if n.step != step]


def _light(problem: Exception) -> Exception:
    """The same without what its tracebacks hold."""
    part: BaseException | None = problem
    while part is not None:
        traceback.clear_frames(part.__traceback__)
        part = part.__cause__ or part.__context__
    return problem


def as_findings(notes: list[Note]) -> list[Finding]:
    """Warnings for the manifest of the next export, one for each step."""
    found = {
        note.step: warning("export-error", step_name(note.step), note.message)
        for note in notes
    }
    return list(found.values())


def as_state(notes: list[Note], best_step: int) -> list[dict[str, Any]]:
    """The same for the state file, which ``finalize`` reads."""
    newest = {note.step: note for note in notes}
    return [
        {"step": note.step, "message": note.message, "best": note.step == best_step}
        | ({"by": note.by} if note.by is not None else {})
        for note in newest.values()
    ]
