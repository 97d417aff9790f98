"""Other file systems, full ones, and the kernel's own view of the calls."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Desk
from tests.faults.export_once import REFUSED, look
from tests.helpers.tiny import REPOSITORY

# What changes a folder; strace names them by the kernel's words.
SYSCALLS = ("mkdir", "rename", "symlink", "unlink", "unlinkat", "fsync", "write")


@contextlib.contextmanager
def tmpfs(place: Path, size: str) -> Iterator[bool]:
    """A small file system in memory; False where it cannot be mounted."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(place)], check=True)


def test_an_output_dir_on_another_device(desk: Desk, row: Any) -> None:
    place = desk.root / "device"
    with tmpfs(place, "8m") as mounted:
        if not mounted:  # shared memory is another device too
            shutil.rmtree(place)
            place = Path("/dev/shm") / f"spec-export-{os.getpid()}"
            place.mkdir()
        try:
            assert place.stat().st_dev != desk.source.stat().st_dev
            found = desk.trial(output_dir=str(place / "out"))
        finally:
            if not mounted:
                shutil.rmtree(place)
    assert (found["code"], found["outcome"]) == (0, "new"), found["said"]
    assert found["half"] == [] and found["went_on"]
    row("output_dir on another device", found["outcome"])


def test_a_full_disk(desk: Desk, row: Any) -> None:
    place = desk.root / "small"
    held = sum(f.stat().st_size for f in desk.template.rglob("*") if f.is_file())
    with tmpfs(place, f"{held // 1024 + 40}k") as mounted:
        if not mounted:
            row("full tmpfs", "not run: it cannot be mounted here")
            return
        rest = shutil.disk_usage(place).free - held
        (place / "ballast").write_bytes(bytes(max(rest - 30_000, 0)))
        found = desk.trial(output_dir=str(place / "out"), refill=True)
        assert (found["code"], found["outcome"]) == (REFUSED, "old"), (
            found,
            desk.stderr(),
        )
        assert found["half"] == [] and found["went_on"], found["said"]
        assert "disk-full" in found["said"]
    row("full tmpfs, then freed", found["outcome"])


def has_strace() -> bool:
    """Whether strace can be had: it is installed where root may do that."""
    if shutil.which("strace") is None and os.getuid() == 0:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["apt-get", "install", "-y", "-q", "strace"],
                capture_output=True,
                timeout=120,
                check=False,
            )
    if shutil.which("strace") is None:
        return False
    tried = subprocess.run(["strace", "-e", "trace=none", "true"], check=False)
    return tried.returncode == 0


_STRIDES = {"fsync": 3, "write": 7}  # each takes a process of its own


@pytest.mark.timeout(3600)
def test_killed_by_the_kernel_at_each_call(desk: Desk, row: Any) -> None:
    """strace kills at the n-th call below the output_dir; no shim of ours is in it."""
    if not has_strace():
        row("kill -9 by strace", "not run: strace cannot be had here")
        return
    seen: Counter[str] = Counter()
    for call in SYSCALLS:  # strace counts each kind, and each thread, by itself
        for at in range(1, 100, _STRIDES.get(call, 1)):
            out = desk.root / "traced"
            shutil.copytree(desk.template, out, symlinks=True)
            done = subprocess.run(
                [
                    *("strace", "-f", "-o", "/dev/null", "-e", f"trace={call}"),
                    *("-e", f"inject={call}:signal=KILL:when={at}"),
                    *(sys.executable, "-m", "tests.faults.export_once"),
                    *(str(desk.source), str(desk.target), str(out)),
                ],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            state = look(out)
            shutil.rmtree(out)
            assert state.half == [], f"{call} {at}"
            if done.returncode == 0:
                assert state.outcome == "new"
                break
            assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
            seen[state.outcome] += 1
    assert seen["old"] and seen["new"]
    row(
        f"kill -9 by strace at {seen.total()} system calls",
        f"old {seen['old']}, new {seen['new']}",
    )
