"""Signals and ranks that meet an export at a bad moment."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from spec_export.training.hook import TrainingEvent
from tests.e2e.test_training_background import Slow
from tests.e2e.test_training_export import Calls, exporter, names, recipe
from tests.helpers.tiny import TORCHRUN, Tiny, launched, run_training


def test_a_signal_while_an_export_waits_for_the_one_before(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had not begun, so the interrupted save exports these weights."""
    slow = Slow(monkeypatch)

    def soon(event: TrainingEvent) -> None:
        if event.reason == "step" and event.global_step == 2:
            me = os.getpid()
            threading.Timer(1, lambda: os.kill(me, signal.SIGTERM)).start()
            threading.Timer(2, slow.gate.set).start()

    exports = exporter(tmp_path)
    flags = tiny.flags(tmp_path / "run", "--epochs", "3", "--max-steps", "1")
    run_training(flags, Calls(soon), exports)
    assert (tmp_path / "run" / "interrupted").is_dir()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert exports.errors == []


RANK = """
import os, signal, sys, time
from spec_export.training import callback
from spec_export.training.launch import main

mode, recipe, other = sys.argv[1:4]
rank = os.environ["RANK"]
if mode == "signal":
    wait = callback.Worker.wait

    def interrupted(self, seconds=None):
        # Once, while rank 1 is in a broadcast.
        if rank == "0" and not hasattr(callback, "told"):
            callback.told = True
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(5)
        return wait(self, seconds)

    callback.Worker.wait = interrupted
else:
    recipe = recipe if rank == "0" else other
sys.exit(main(["--config", recipe, *sys.argv[4:]]))
"""


def on_two_ranks(
    tiny: Tiny, tmp_path: Path, mode: str, *more: str
) -> subprocess.CompletedProcess[str]:
    path = recipe(tmp_path, tiny)
    content = yaml.safe_load(path.read_text())
    export = content["callbacks"][0]["init_args"]
    other = tmp_path / "other.yaml"
    export |= {"background": mode != "signal"}
    if mode == "recipes":
        export["compare"] = {"positions": 64, "max_seconds": 1e-6}
    path.write_text(yaml.safe_dump(content))
    export |= {"compare": {"on": "never"}, "every": {"steps": 1}}
    other.write_text(yaml.safe_dump(content))
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    arguments = (mode, str(path), str(other), "--fsdp-shard", *more)
    return launched(*TORCHRUN, str(script), *arguments, seconds=90)


def test_a_recipe_of_its_own_leaves_no_rank_waiting(tiny: Tiny, tmp_path: Path) -> None:
    """Rank 1 would compare nothing and export each step; rank 0's recipe holds."""
    done = on_two_ranks(tiny, tmp_path, "recipes", "--max-steps", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert names(tmp_path) == ["step-00000002"]


def test_ranks_that_a_signal_finds_apart_still_agree(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Rank 0 has handed its export over, rank 1 does not know of that."""
    done = on_two_ranks(tiny, tmp_path, "signal", "--max-steps", "2")
    assert "timed out" not in done.stderr + done.stdout, done.stderr[-3000:]
    assert (tmp_path / "run" / "interrupted").is_dir()
    assert names(tmp_path) == ["step-00000002"]
