"""A training that is stopped and resumed at random while its disk fills and empties.

``python -m tests.faults.soak --minutes 30``. Each training is a process of its own,
with an export every few steps. For half of the time trainings get SIGTERM at some
moment and are resumed, and every other one has no room on its disk for a while; the
other half is one training, whose disk fills and empties all along. After each every
export that is visible has to verify, and the state has to be there for the next
resume; over the long one nothing may have grown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.tiny import REPOSITORY, make_tiny

KEEP = 3
ROOM = 20_000  # bytes of the largest file on a full disk
EMPTIED = 50  # steps after which a disk is as full as before, for as long
ENDLESS = 1_000_000  # epochs


@dataclass
class Report:
    """What a soak saw.

    Attributes:
        rounds: Trainings; ``interrupted`` of them got a signal, ``killed`` of those
            after their last step, when nobody handles it any more.
        halves: Checkpoints that the trainer left without its state, taken away.
        crashes: Trainings that ended because pydantic made an error of its own of the
            signal, in the middle of speculators' own save.
        exports: Exports that verified, counted again in each round.
        failures: Exports that the full disk refused.
        problems: What must not be; empty if all is well.
        growth: For each export of the longest training: resident MB, threads, files.
    """

    rounds: int = 0
    interrupted: int = 0
    killed: int = 0
    halves: int = 0
    crashes: int = 0
    exports: int = 0
    failures: int = 0
    problems: list[str] = field(default_factory=list)
    growth: list[tuple[float, int, int]] = field(default_factory=list)


class Watch:
    """A callback that notes what the process holds, and takes the disk's room away."""

    def __init__(self, notes: Path, full: range) -> None:
        self.notes, self.full, self.steps = notes, full, 0

    def on_event(self, event: Any) -> None:
        if event.reason != "step":
            return
        self.steps += 1
        # A limit of file size refuses what a full disk refuses, and for us alone; but
        # not to the notes.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        held = (
            pages * resource.getpagesize() / 1e6,
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
        )
        with self.notes.open("a") as file:
            file.write(json.dumps(held) + "\n")
        if self.steps % EMPTIED in self.full:
            room = (ROOM, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, room)


def train(root: Path, epochs: int, full: range) -> None:
    """One training, in this process."""
    from speculators.train.checkpointer import SingleGPUCheckpointer

    from spec_export.training.callback import SGLangExport
    from tests.helpers.tiny import run_training

    exporter = SGLangExport(
        output_dir=root / "exports",
        every={"steps": 2},
        keep_last=KEEP,
        compare={"on": "never"},
    )
    # Their own checkpoints are not what is tried here, and would fail on a full disk.
    saved = SingleGPUCheckpointer.save_checkpoint

    def with_room(*args: Any, **kwargs: Any) -> Any:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        try:
            return saved(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    SingleGPUCheckpointer.save_checkpoint = with_room
    flags = make_tiny().flags(root / "run", "--epochs", str(epochs))
    run_training(flags, Watch(root / "notes", full), exporter)
    print(json.dumps([str(problem) for problem in exporter.errors]))


def one_round(
    root: Path, report: Report, dice: random.Random, seconds: float, epochs: int
) -> None:
    """Train, interrupt after some seconds, look."""
    report.rounds += 1
    (root / "notes").unlink(missing_ok=True)
    # A signal in the middle of the trainer's own save leaves half a checkpoint, and
    # speculators then resumes from that one and fails: not what is tried here.
    for path in (root / "run").glob("[0-9]*"):
        if not (path / "training_state.json").is_file():
            shutil.rmtree(path)
            report.halves += 1
    start = dice.randint(2, 4)
    fills = epochs == ENDLESS or dice.random() < 0.5
    full = (start, start + 3) if fills else (0, 0)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.faults.soak", "--train", str(root)),
            *("--epochs", str(epochs), "--full", *map(str, full)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (root / "notes").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=seconds)  # what it says must not jam it
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                report.interrupted += 1
            break
        time.sleep(0.05)
    out, err = process.communicate(timeout=180)
    if process.returncode == -signal.SIGTERM and last_epoch(root) == epochs - 1:
        report.killed += 1
        look(root / "exports", report)
        return
    if "PydanticSerializationError" in err and "in save_pretrained" in err:
        report.crashes += 1
        look(root / "exports", report)
        return
    if process.returncode:
        report.problems.append(
            f"round {report.rounds}: exit {process.returncode} {err[-800:]}"
        )
        return
    for failed in json.loads(out.splitlines()[-1]):
        if failed.startswith("disk-full"):
            report.failures += 1
        else:
            report.problems.append(f"round {report.rounds}: {failed}")
    notes = [tuple(json.loads(n)) for n in (root / "notes").read_text().splitlines()]
    if len(notes) > len(report.growth):
        report.growth = notes
    look(root / "exports", report)


def last_epoch(root: Path) -> int:
    """The newest epoch that the trainer saved whole."""
    saved = [p.parent.name for p in root.glob("run/*/model.safetensors")]
    return max((int(name) for name in saved if name.isdigit()), default=-1)


def look(output_dir: Path, report: Report) -> None:
    """Every visible export verifies, and there are not more than there should be."""
    from spec_export.findings import has_errors
    from spec_export.serving.verify import verify

    if not output_dir.is_dir():
        return
    steps = [p for p in output_dir.iterdir() if p.name.startswith("step-")]
    for path in steps:
        if has_errors(verify(path, files_only=True).findings):
            report.problems.append(
                f"round {report.rounds}: {path.name} does not verify"
            )
        report.exports += 1
    for link in ("latest", "best"):
        if (output_dir / link).is_symlink() and not (output_dir / link).exists():
            report.problems.append(f"round {report.rounds}: {link} leads nowhere")
    # Of each run `best` and `latest` may be kept beyond the newest.
    runs = len(list(output_dir.glob(".spec_export_run-*.json")))
    if len(steps) > runs * (KEEP + 2):
        report.problems.append(f"round {report.rounds}: {len(steps)} exports are left")
    left = [p.name for p in output_dir.glob(".*") if "spec_export_run-" not in p.name]
    if len(left) > 1:  # one may be of the process that just ended
        report.problems.append(f"round {report.rounds}: left behind {left}")


def leaks(growth: list[tuple[float, int, int]]) -> list[str]:
    """What grew over the second half of a training."""
    if len(growth) < 8:
        return []
    middle, end = growth[len(growth) // 2], growth[-1]
    names = ("resident MB", "threads", "open files")
    allowed = (max(20.0, 0.1 * middle[0]), 2, 4)
    return [
        f"{name} grew from {a} to {b}"
        for name, a, b, more in zip(names, middle, end, allowed, strict=True)
        if b > a + more
    ]


def soak(minutes: float, seed: int = 0) -> Report:
    """Train and interrupt for some minutes."""
    report, dice = Report(), random.Random(seed)
    make_tiny()
    root = Path(tempfile.mkdtemp(prefix="spec-export-soak-"))
    half = time.monotonic() + 30 * minutes
    stopped, lasting = root / "stopped", root / "lasting"
    try:
        for folder in (stopped, lasting):
            folder.mkdir()
        while time.monotonic() < half:
            seconds = dice.uniform(0.2, 3.0)
            one_round(stopped, report, dice, seconds, 3 + report.rounds)
        one_round(lasting, report, dice, 30 * minutes, ENDLESS)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.problems += leaks(report.growth)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--full", type=int, nargs=2, default=(0, 0))
    chosen = parser.parse_args()
    if chosen.train is not None:
        train(chosen.train, chosen.epochs, range(*chosen.full))
        return 0
    report = soak(chosen.minutes, chosen.seed)
    print(
        f"{report.rounds} trainings, {report.interrupted} interrupted, "
        f"{report.killed} of them killed at their end, "
        f"{report.halves} half checkpoints of the trainer, {report.crashes} crashes, "
        f"{report.exports} exports verified, {report.failures} refused by a full disk"
    )
    if report.growth:
        print(f"first and last of {len(report.growth)} steps: MB, threads, files")
        print(report.growth[0], report.growth[-1])
    print("\n".join(report.problems) or "no problem")
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
