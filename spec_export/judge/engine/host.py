"""Where SGLang is, what it can do there, and one job at a time for it. No torch here.

speculators and SGLang pin other releases of the same packages, so SGLang usually has
an environment of its own. What runs there is ``process.py``, by its path; and
the target in transformers runs beside it, in ``target.py``: a process that is
out of memory or takes too long ends, and this one goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PYTHON_VARIABLE = "SPEC_EXPORT_SGLANG_PYTHON"
PROCESS = Path(__file__).with_name("process.py")
TARGET = Path(__file__).with_name("target.py")
EXAMINE_SECONDS = 120.0
# The line of a traceback that says what happened, and what argparse says.
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Refused)\b.*|.+: error: .+)$", re.M)
_LONGEST = 400  # characters of it that are repeated


class EngineFailed(Exception):
    """A process did not do its job; the text says why, in one line."""


@dataclass(frozen=True)
class Sglang:
    """An SGLang that was found.

    Attributes:
        python: The Python of its environment.
        version: Its release.
        devices: On which of ``cuda`` and ``cpu`` it can run there.
        plugin: Whether our package is installed beside it.
    """

    python: Path
    version: str
    devices: tuple[str, ...]
    plugin: bool

    @property
    def release(self) -> tuple[int, ...]:
        """Numbers of the version, for comparing: 0.5.4.post2 is (0, 5, 4, 2)."""
        return release_numbers(self.version)


@dataclass(frozen=True)
class Setup:
    """How SGLang is started for a comparison, and what is read of its answers.

    Attributes:
        device: ``cpu`` or ``cuda``.
        args: Behind the launch line; ``{prompts}`` is the number of prompts.
        algorithm_args: More of them, by speculative algorithm.
        environment: Variables of the process.
        target_dtype: Of the target in transformers; ``auto`` is that of its file.
        counted_since: The release since which rounds are counted as here.
        counts: What ``rounds`` and ``histogram`` are called in an answer.
    """

    device: str
    args: tuple[str, ...]
    algorithm_args: Mapping[str, Sequence[str]]
    environment: Mapping[str, str]
    target_dtype: str
    counted_since: str
    counts: Mapping[str, str]


def release_numbers(version: str) -> tuple[int, ...]:
    """Three numbers and that of a post-release; what comes before one is lower."""
    numbers = [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:4]]
    if "post" not in version:
        numbers = numbers[:3]
    return tuple(numbers + [0] * (4 - len(numbers)))


def sglang_python() -> Path | None:
    """The Python that has SGLang: the named one, else this one; None: there is none.

    An empty variable switches the engine off.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named is not None:
        # Not resolved: a virtual environment is known by the name of its link.
        return Path(named).absolute() if named else None
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    return None


def why_none() -> str:
    """Why ``sglang_python`` found nothing, and what would change that."""
    if os.environ.get(PYTHON_VARIABLE) == "":
        return f"{PYTHON_VARIABLE} is empty: the engine is switched off"
    return (
        f"SGLang is not installed here; {PYTHON_VARIABLE} can name the Python of an "
        "environment that has it"
    )


def examine(python: Path) -> Sglang:
    """Ask an environment for its SGLang.

    Raises:
        EngineFailed: the Python does not run, or has no SGLang.
    """
    with TemporaryDirectory(prefix="spec-export-") as folder:
        answer = ask(python, PROCESS, {"do": "examine"}, Path(folder), EXAMINE_SECONDS)
    return Sglang(
        python, answer["version"], tuple(answer["devices"]), bool(answer["plugin"])
    )


def ask(
    python: Path,
    script: Path,
    job: Mapping[str, Any],
    folder: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Let another Python do a job; nothing of it is left running.

    Args:
        python: The interpreter.
        script: Reads the job from the file of its first argument and writes its
            answer to that of its second; both are JSON.
        job: What to do.
        folder: Where job, answer and log may lie.
        seconds: It is ended when it takes longer.
        environment: Variables besides those of this process.

    Raises:
        EngineFailed: it could not be started, failed or took too long.
    """
    names = (f"{script.stem}.{part}" for part in ("job", "answer", "log"))
    job_file, answer, log = (folder / name for name in names)
    job_file.write_text(json.dumps(job))
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                [str(python), str(script), str(job_file), str(answer)],
                stdin=subprocess.PIPE,  # never written to: it ends when we do
                stdout=output,
                stderr=subprocess.STDOUT,
                # A script's folder is not searched for modules: ours have common names.
                env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
                start_new_session=True,  # SGLang starts processes of its own
            )
        except OSError as problem:
            why = problem.strerror or type(problem).__name__
            raise EngineFailed(f"{python.name} cannot be run: {why}") from problem
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as problem:
            raise EngineFailed(f"it took longer than {seconds:.0f} s") from problem
        finally:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        said: dict[str, Any] = json.loads(answer.read_bytes())
    except (OSError, ValueError) as problem:
        raise EngineFailed(_why(code, log)) from problem
    return said


def _why(code: int, log: Path) -> str:
    """What a process said last, in one line."""
    said = _ERROR.findall(log.read_text(errors="replace"))
    if said:
        return str(said[-1])[:_LONGEST].strip()
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "it was killed, as for want of memory"
    return f"it ended with exit status {code} and said nothing"
