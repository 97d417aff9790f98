"""``finalize`` and ``verify`` against copying and hashing; how commands start."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spec_export.artifact.header import read_header
from tests.bench.conftest import drop, ratio, said, timed
from tests.bench.workload import make_export
from tests.helpers.tiny import REPOSITORY

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
# Modules are compiled once, as in an installation.
ENV.pop("PYTHONDONTWRITEBYTECODE", None)
VERIFIED = 2_000_000_000  # bytes


# Started from a large process, a small one would inherit its peak of memory.
LAUNCHER = """
import os, sys, time
began = time.perf_counter()
null = (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[null])
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - began
cpu = usage.ru_utime + usage.ru_stime
print(os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss / 1024, cpu)
"""


LOADED = """
import json, sys
from spec_export import cli
cli.run(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
"""


def command(*argv: object) -> tuple[float, float, float]:
    """Run one command.

    Returns:
        Wall seconds, the peak of its resident memory in MB, seconds of processor.
    """
    run = [sys.executable, "-m", "spec_export.cli", *map(str, argv)]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, *run],
        cwd=REPOSITORY,
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    code, seconds, memory, cpu = done.stdout.split()
    assert code == "0", done.stderr
    return float(seconds), float(memory), float(cpu)


def hash_pass(*paths: Path) -> None:
    """The baseline, as fast as it gets: into whole pages that stay in the cache."""
    buffer = memoryview(mmap.mmap(-1, 1 << 20))
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])


@pytest.mark.timeout(3600)
def test_finalize(files: Any, tmp_path: Path, rounds: int, row: Any) -> None:
    source, target = files
    weights, theirs = source / "model.safetensors", target / "model.safetensors"
    out, copy = tmp_path / "out", tmp_path / "copy"

    def copied_and_hashed() -> None:
        subprocess.run(["cp", str(weights), str(copy)], check=True)
        hash_pass(weights, theirs)

    times: dict[str, list[float]] = {k: [] for k in ("f", "cp")}
    memory = 0.0
    for _ in range(rounds):
        drop(out)
        times["cp"].append(timed(copied_and_hashed))
        copy.unlink()
        os.sync()  # what the copy left to be written is not finalize's
        seconds, peak, _ = command("finalize", source, "--no-compare", "--output", out)
        times["f"].append(seconds)
        memory = max(memory, peak)
    start = [command("show", out)[0] for _ in range(rounds)]
    idle = min(start)
    read = weights.stat().st_size + theirs.stat().st_size
    finalize = ratio(times["f"], times["cp"])
    row(
        f"finalize --no-compare   {said(times['f'])}; cp + hash of {read / 1e9:.2f} GB "
        f"{said(times['cp'])}; ratio {finalize:.2f} (<= 1.5 at 2 GB)"
    )
    row(f"peak memory             {memory:.0f} MB (<= 300 MB)")
    assert memory <= 300
    # Of a small checkpoint the start of the interpreter is the larger part.
    spare = 3 * idle / min(times["cp"])
    assert finalize <= 1.5 + spare
    share = sum(p.stat().st_size for p in out.iterdir() if p.is_file())
    share /= weights.stat().st_size
    row(f"bytes of the export     {share:.3f} of the checkpoint's (<= 0.45)")
    if weights.stat().st_size > 1e9:  # of a small target the head is a larger part
        assert share <= 0.45
    tensors = read_header(out / "model.safetensors").tensors
    assert not any("embed_tokens" in name for name in tensors)
    shutil.rmtree(out)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shards", [1, 4])
def test_verify(shards: int, tmp_path: Path, rounds: int, row: Any) -> None:
    out = tmp_path / "out"
    size = make_export(out, VERIFIED, None if shards == 1 else VERIFIED // shards)
    paths = sorted(out.glob("*.safetensors"))
    assert len(paths) == shards
    times: dict[str, list[float]] = {k: [] for k in ("hash", "v", "hash cpu", "v cpu")}
    memory = 0.0
    for _ in range(rounds):
        began = time.process_time()
        times["hash"].append(timed(lambda: hash_pass(*paths)))
        times["hash cpu"].append(time.process_time() - began)
        seconds, peak, cpu = command("verify", out, "--files-only")
        times["v"].append(seconds)
        times["v cpu"].append(cpu)
        memory = max(memory, peak)
    found = ratio(times["v cpu"], times["hash cpu"])
    row(
        f"verify --files-only     {said(times['v'])}; hash of {size / 1e9:.2f} GB in "
        f"{shards} file(s) {said(times['hash'])}; ratio "
        f"{ratio(times['v'], times['hash']):.2f}, of processor time {found:.2f} "
        f"(<= 1.2); {memory:.0f} MB"
    )
    # Not of the clock: other programs run on the same cores. Alone, the two agree.
    assert found <= 1.2
    assert memory <= 300
    shutil.rmtree(out)


def test_commands_start_quickly(files: Any, tmp_path: Path, row: Any) -> None:
    source, _ = files
    out = tmp_path / "out"
    command("finalize", source, "--no-compare", "--output", out)
    for name, argv in (("--help", ("--help",)), ("show", ("show", out))):
        loaded = subprocess.run(
            [
                *(sys.executable, "-c"),
                LOADED,
                *map(str, argv),
            ],
            cwd=REPOSITORY,
            env=ENV,
            capture_output=True,
            text=True,
            check=True,
        )
        modules = json.loads(loaded.stdout.splitlines()[-1])
        assert not {"torch", "numpy", "transformers"} & set(modules), name
        runs = [command(*argv) for _ in range(7)]
        seconds, cpu = [run[0] for run in runs], min(run[2] for run in runs)
        row(f"spec-export {name:<11} {said(seconds)} (<= 300 ms on a quiet machine)")
        # Not of the clock: other programs run on the same cores.
        assert cpu <= 0.45
