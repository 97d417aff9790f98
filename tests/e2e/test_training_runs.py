"""Several trainings and one output_dir; what a resume goes on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spec_export.artifact.manifest import Manifest
from spec_export.artifact.publish import retain
from spec_export.findings import SpecExportError
from spec_export.training import callback as callback_module
from spec_export.training.attach import attach, require_apart
from spec_export.training.callback import SGLangExport
from spec_export.training.hook import TrainingEvent
from spec_export.training.recipe import read_recipe
from tests.e2e.test_training_background import better_each_epoch
from tests.e2e.test_training_export import (
    NEVER,
    Calls,
    exporter,
    link,
    losses,
    manifest,
    names,
    recipe,
)
from tests.helpers.cli import spec_export
from tests.helpers.tiny import Tiny, run_training


def test_two_trainings_in_one_output_dir_keep_out_of_each_others_way(
    tiny: Tiny, tmp_path: Path
) -> None:
    def train(run: str, *more: str) -> Any:
        exports = exporter(tmp_path, keep_last=1)
        flags = tiny.flags(tmp_path / run, "--max-steps", "1", *more)
        run_training(flags, Calls(better_each_epoch), exports)
        assert exports.errors == []
        return exports.results[-1].manifest.run_id

    first = train("a")
    second = train("b", "--seed", "7")
    assert first != second
    # The first goes on: it is the run that it was, and removes its own exports only.
    assert train("a", "--epochs", "2") == first
    runs = {
        name: manifest(tmp_path / "exports" / name)["run_id"]
        for name in names(tmp_path)
    }
    assert runs == {"step-00000001.2": second, "step-00000002": first}
    assert link(tmp_path, "latest") == link(tmp_path, "best") == "step-00000002"
    files = sorted((tmp_path / "exports").glob(".spec_export_run-*.json"))
    states = [json.loads(file.read_text())["run_id"] for file in files]
    assert sorted(states) == sorted([first, second])
    for name in names(tmp_path):
        assert spec_export("verify", tmp_path / "exports" / name).code == 0


def test_within_a_run_the_step_counts_and_not_the_clock(
    tiny: Tiny, tmp_path: Path
) -> None:
    exports = exporter(tmp_path, every={"steps": 1}, when_busy="wait")
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "3"), exports)
    folder = tmp_path / "exports"
    early = folder / "step-00000001" / "spec_export_manifest.json"
    os.utime(early, (2e9, 2e9))
    run_id = Manifest.read(folder / "step-00000001").run_id
    removed = retain(folder, 2, run_id)
    assert [path.name for path in removed] == ["step-00000001"]


def test_a_resume_keeps_the_best_of_its_own_run(tiny: Tiny, tmp_path: Path) -> None:
    """Another training has taken the link meanwhile."""

    def train(run: str, *more: str) -> None:
        exports = exporter(tmp_path, keep_last=1)
        flags = tiny.flags(tmp_path / run, "--max-steps", "1", *more)
        run_training(flags, losses(1, 2, 3), exports)
        assert exports.errors == []

    train("a", "--epochs", "2")
    train("b", "--seed", "7")
    assert link(tmp_path, "best") == "step-00000001.2"
    train("a", "--epochs", "3")
    assert link(tmp_path, "best") == "step-00000001"
    assert names(tmp_path) == ["step-00000001", "step-00000001.2", "step-00000003"]

    # The link `latest` moves with each export, `best` only where one is better.
    for latest, warned in (("step-00000003", False), ("step-00000001.2", True)):
        (tmp_path / "exports" / "latest").unlink()
        (tmp_path / "exports" / "latest").symlink_to(latest)
        done = spec_export("finalize", tmp_path / "exports", "--no-compare")
        assert done.code == 0
        assert ("runs-mixed" in done.codes("warning")) is warned


def test_a_resume_knows_that_the_best_was_not_exported(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = callback_module.write_export

    def fail_second(snapshot: Any, *rest: Any) -> Any:
        if snapshot.record.global_step == 2:
            raise OSError(5, "Input/output error")
        return write(snapshot, *rest)

    monkeypatch.setattr(callback_module, "write_export", fail_second)
    for epochs in ("2", "3"):
        flags = tiny.flags(tmp_path / "run", "--max-steps", "1", "--epochs", epochs)
        run_training(flags, losses(3, 1, 2, 0.5), exporter(tmp_path))
        assert link(tmp_path, "best") == "step-00000001"
        done = spec_export("finalize", tmp_path / "exports", "--no-compare")
        assert done.code == 1
        assert done.finding("export-error")["subject"] == "step 2"
    found = manifest(tmp_path / "exports" / "step-00000003")["findings"]
    told = [f["subject"] for f in found if f["code"] == "export-error"]
    assert told == ["step-00000002"]
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1", "--epochs", "4")
    run_training(flags, losses(3, 1, 2, 0.5), exporter(tmp_path))
    assert link(tmp_path, "best") == "step-00000004"
    done = spec_export("finalize", tmp_path / "exports", "--no-compare")
    assert done.code == 0  # these are better


def test_a_kill_in_the_middle_of_the_best_is_no_secret(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process leaves is what lies there while it writes."""
    write, left = callback_module.write_export, tmp_path / "left"

    def look(snapshot: Any, *rest: Any) -> Any:
        if snapshot.record.global_step == 2:
            shutil.copytree(tmp_path / "exports", left, symlinks=True)
        return write(snapshot, *rest)

    monkeypatch.setattr(callback_module, "write_export", look)
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1", "--epochs", "2")
    run_training(flags, losses(3, 1), exporter(tmp_path))
    done = spec_export("finalize", left, "--no-compare")
    assert done.code == 0  # this process is the one that writes
    finding = done.finding("export-error")
    assert finding["severity"] == "warning" and "being written" in finding["message"]

    killed = subprocess.Popen(["true"])
    killed.wait()
    (state,) = left.glob(".spec_export_run-*.json")
    own, its = f"-{os.getpid()}", f"-{killed.pid}"
    state.write_text(state.read_text().replace(f'{own}"', f'{its}"'))
    done = spec_export("finalize", left, "--no-compare")
    assert done.code == 1
    finding = done.finding("export-error")
    assert finding["subject"] == "step 2" and "the process ended" in finding["message"]
    # It was not killed: what it wrote is there, and nothing is held against it.
    assert spec_export("finalize", tmp_path / "exports", "--no-compare").code == 0


def test_the_best_is_exported_between_the_steps_that_are_due(
    tiny: Tiny, tmp_path: Path
) -> None:
    exports = exporter(tmp_path, every={"steps": 2}, keep_last=1, when_busy="wait")
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1", "--epochs", "5")
    run_training(flags, losses(3, 2, 1, 2, 3), exports)
    steps = [result.manifest.training.global_step for result in exports.results]
    assert steps == [1, 2, 3, 4, 5]
    assert link(tmp_path, "best") == "step-00000003"
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


@pytest.mark.parametrize("there", [[], ["step-00000001"]])
def test_the_same_command_again_exports_what_was_lost_at_the_end(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str]
) -> None:
    """Nothing is left to train then."""
    write = callback_module.write_export
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1", "--epochs", "2")

    def fail(snapshot: Any, *rest: Any) -> Any:
        if snapshot.record.global_step > len(there):
            raise OSError(5, "Input/output error")
        return write(snapshot, *rest)

    monkeypatch.setattr(callback_module, "write_export", fail)
    run_training(flags, losses(3, 1), exporter(tmp_path))
    assert names(tmp_path) == there
    monkeypatch.setattr(callback_module, "write_export", write)
    for _ in range(2):
        exports = exporter(tmp_path)
        run_training(flags, exports)
        assert names(tmp_path) == [*there, "step-00000002"]
    assert list(exports.results) == []  # once is enough
    assert link(tmp_path, "best") == link(tmp_path, "latest") == "step-00000002"
    tensors = manifest(tmp_path / "exports" / "step-00000002")["tensors"]
    assert tensors["fc.weight"]["role"] == "trained"
    done = spec_export("finalize", tmp_path / "exports", "--no-compare")
    assert done.code == 0


def test_a_resume_without_its_past_calls_nothing_frozen(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The output_dir is a new one, and a signal comes before the first step."""

    def interrupt(event: TrainingEvent) -> None:
        if event.reason == "start":
            train = event.trainer.train_epoch

            def signalled(*args: Any, **more: Any) -> Any:
                os.kill(os.getpid(), signal.SIGTERM)
                return train(*args, **more)

            event.trainer.train_epoch = signalled

    flags = tiny.flags(tmp_path / "run", "--max-steps", "2")
    run_training(flags, exporter(tmp_path))
    moved = SGLangExport(output_dir=tmp_path / "moved", compare=NEVER)
    run_training([*flags, "--epochs", "2"], moved, Calls(interrupt))
    (result,) = moved.results
    tensors = result.manifest.tensors
    assert tensors["fc.weight"].role is None
    assert tensors["lm_head.weight"].role == "frozen"  # the target's own
    codes = {f.code for f in result.manifest.findings}
    assert not codes & {"optimizer-no-change", "nothing-trained"}


def test_two_exporters_of_one_training_need_two_folders(
    tiny: Tiny, tmp_path: Path
) -> None:
    twice = [exporter(tmp_path), exporter(tmp_path, every="best")]
    with pytest.raises(SpecExportError) as refused, attach(object(), *twice):
        raise AssertionError("attached")
    assert refused.value.exit_code == 2
    (finding,) = refused.value.findings
    assert (finding.code, finding.subject) == (
        "callback-argument",
        "SGLangExport 2.output_dir",
    )
    path = recipe(tmp_path, tiny)
    content = path.read_text()
    block = content[: content.index("train:")].removeprefix("callbacks:\n")
    path.write_text(content.replace(block, 2 * block))
    with pytest.raises(SpecExportError, match=r"that of callbacks\[0\]") as refused:
        read_recipe(path)
    assert refused.value.findings[0].subject == "callbacks[1].init_args.output_dir"
    require_apart([("one", tmp_path / "exports"), ("two", tmp_path / "other")])
