"""Several trainings and one output_dir; what a resume goes on with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from spec_export.artifact.manifest import Manifest
from spec_export.artifact.publish import retain
from tests.e2e.test_training_background import better_each_epoch
from tests.e2e.test_training_export import Calls, exporter, link, manifest, names
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
