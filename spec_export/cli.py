"""The command line: runs a command and prints what it says.

With ``--json`` stdout is one object on every exit; people's output goes to stderr.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import typer

from spec_export.commands import Outcome, app
from spec_export.findings import Finding, SpecExportError, error, has_errors

# typer carries its own copy of click since 0.2x; the public BadParameter leads to the
# classes that are really raised.
UsageProblem: Any = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

# The keys that a command's object has on every exit, null where there is no answer.
_ADDS = {
    "finalize": ("source", "output", "verdict", "min_version", "requires_plugin"),
    "check": ("plan", "min_version", "requires_plugin"),
    "verify": ("status", "verdict"),
    "diff": ("differences",),
    "doctor": ("checks",),
}


def _command(argv: list[str]) -> str:
    return next((a for a in argv if not a.startswith("-")), "")


def _adds(argv: list[str]) -> tuple[str, ...]:
    command = _command(argv)
    if command != "show":
        return _ADDS.get(command, ())
    asked = (n for n in ("launch", "tensors", "manifest") if f"--{n}" in argv)
    return (next(asked, "manifest"),)


def _print_findings(findings: Iterable[Finding]) -> None:
    for f in findings:
        print(f"{f.severity}[{f.code}] {f.subject}: {f.message}", file=sys.stderr)
        if f.hint:
            print(f"  hint: {f.hint}", file=sys.stderr)


def _finish(argv: list[str], outcome: Outcome, code: int) -> int:
    try:
        _print(argv, outcome, code)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read has left, as `| head` does; the rest would fail at the exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE
    return code


def _print(argv: list[str], outcome: Outcome, code: int) -> None:
    if "--json" in argv and _command(argv) != "train":
        payload = {
            "ok": code == 0,
            "command": _command(argv),
            "findings": [f.to_json() for f in outcome.findings],
            **dict.fromkeys(_adds(argv)),
            **outcome.data,
        }
        print(json.dumps(payload))
    else:
        _print_findings(outcome.findings)
        if outcome.text:
            print(outcome.text, file=sys.stdout if outcome.shown else sys.stderr)


def _usage(exc: Any) -> Outcome:
    param = getattr(exc, "param", None)
    subject = "command line" if param is None else str(param.name)
    hint = "spec-export --help"
    ctx = getattr(exc, "ctx", None)
    if ctx is not None:
        hint = f"{ctx.command_path} --help"
    return Outcome([error("option-invalid", subject, exc.format_message(), hint)])


def _on_signal(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def run(argv: list[str]) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name.

    Returns:
        0 yes, 1 no, 2 a wrong question, 101 a bug, 128+n a signal.
    """
    try:
        said = app(argv, prog_name="spec-export", standalone_mode=False)
    except UsageProblem as exc:
        return _finish(argv, _usage(exc), 2)
    except typer.Exit as exc:
        return int(exc.exit_code)
    except typer.Abort:
        return 128 + signal.SIGINT
    except SpecExportError as exc:
        failed = any(f.code == "comparison-failed" for f in exc.findings)
        data = {"verdict": "fail"} if failed else {}
        return _finish(argv, Outcome(exc.findings, data), exc.exit_code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as exc:
        return int(exc.code or 0) if not isinstance(exc.code, str) else 1
    except Exception as exc:
        # What goes wrong in a training goes wrong as under `speculators train`.
        if os.environ.get("SPEC_EXPORT_DEBUG") == "1" or _command(argv) == "train":
            raise
        return _finish(argv, _bug(exc), 101)
    if not isinstance(said, Outcome):  # of --help, which has printed itself
        return int(said or 0)
    failed = has_errors(said.findings) or not said.answer
    return _finish(argv, said, 1 if failed else 0)


def _bug(exc: Exception) -> Outcome:
    return Outcome(
        [
            error(
                "internal-error",
                type(exc).__name__,
                f"{exc}",
                "this is a bug in spec-export; SPEC_EXPORT_DEBUG=1 shows where",
            )
        ]
    )


def main() -> NoReturn:
    """Entry point of the ``spec-export`` script."""
    signal.signal(signal.SIGTERM, _on_signal)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names in broken files need not have a form in the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
