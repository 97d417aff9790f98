"""Talk to SGLang, which lives in an environment of its own. Training side."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PYTHON_VARIABLE = "SPEC_EXPORT_SGLANG_PYTHON"


def sglang_python() -> Path:
    """The Python that has SGLang; without one the test fails and says what to do."""
    default = REPOSITORY / ".venv-sglang" / "bin" / "python"
    python = Path(os.environ.get(PYTHON_VARIABLE, default)).absolute()
    if not os.access(python, os.X_OK):
        pytest.fail(
            f"no SGLang environment: {python} is not there. Run `make test-serving`, "
            f"or set {PYTHON_VARIABLE} to the Python of an environment with "
            "tests/serving/requirements-sglang.txt installed.",
            pytrace=False,
        )
    return python


def sglang_environment() -> dict[str, str]:
    """Environment variables that make SGLang run on a CPU with our stand-in."""
    return os.environ | {
        "PYTHONPATH": str(HERE / "shim"),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def end_of(log: Path) -> str:
    """The last lines of a log, for a failure message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


# Variables under which SGLang's Python imports this package, which is not installed.
IMPORTED = {"PYTHONPATH": f"{HERE / 'shim'}{os.pathsep}{REPOSITORY}"}


def run_script(
    name: str, *arguments: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script of this folder in SGLang's Python, until it ends.

    ``environment`` holds variables besides those of ``sglang_environment``.
    """
    return subprocess.run(
        [sglang_python(), HERE / name, *arguments],
        env=sglang_environment() | (environment or {}),
        capture_output=True,
        text=True,
        timeout=280,
    )


def answer_of(
    name: str, *arguments: Path, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object that such a script prints."""
    done = run_script(name, *arguments, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@contextmanager
def running(
    command: list[str],
    log: Path,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A process with a group of its own, all of which is killed at the end.

    ``environment`` holds variables besides those of ``sglang_environment``.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stderr=errors,
            env=sglang_environment() | (environment or {}),
            start_new_session=True,
            **options,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def serve_job(
    target: Path,
    draft: Path | None,
    prompts: list[list[int]],
    new_tokens: int,
    steps: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """A job of ``engine.py``: a chain of drafts; ``extra`` are ``ServerArgs``."""
    return {
        "do": "serve",
        "target": str(target),
        "draft": None if draft is None else str(draft),
        "prompts": prompts,
        "max_new_tokens": new_tokens,
        "steps": steps,
        "topk": 1,
        "draft_tokens": steps + 1,
        "extra": extra,
    }


class Engine:
    """The engine server of ``engine.py``; one job at a time."""

    def __init__(self, log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        self._context = running(
            [str(sglang_python()), str(HERE / "engine.py")],
            log,
            environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        self._process = self._context.__enter__()
        self.version = self._answer(120)["sglang"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)

    def serve(
        self,
        target: Path,
        draft: Path,
        prompts: list[list[int]],
        new_tokens: int,
        steps: int,
        **extra: Any,
    ) -> list[dict[str, Any]]:
        """Per prompt: output_ids, rounds, histogram, accept_length."""
        job = serve_job(target, draft, prompts, new_tokens, steps, extra)
        return self._ask(job)["prompts"]

    def load(self, target: Path, drafts: list[Path]) -> list[dict[str, Any]]:
        """Per draft: class, ignored (tensors), unset (parameters)."""
        job = {"do": "load", "target": str(target), "drafts": [str(d) for d in drafts]}
        reports = self._ask(job)["reports"]
        return [reports[str(draft)] for draft in drafts]

    def _ask(self, job: dict[str, Any], seconds: float = 120) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(seconds)
        if "error" in answer:
            pytest.fail(f"SGLang: {answer['error']}\n{end_of(self._log)}", False)
        return answer

    def _answer(self, seconds: float) -> dict[str, Any]:
        output, line = self._process.stdout, b""
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([output], [], [], left)
            part = os.read(output.fileno(), 1 << 20) if ready else b""
            if not part:
                why = "ended" if ready else f"gave no answer in {seconds} s"
                pytest.fail(f"SGLang's process {why}\n{end_of(self._log)}", False)
            line += part
        return json.loads(line)
