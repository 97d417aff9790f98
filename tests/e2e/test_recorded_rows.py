"""Real batches in a real training: recorded, compared, counted, and kept at home."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spec_export import cli
from spec_export.judge.acceptance import target_choice
from spec_export.training import batches
from spec_export.training import callback as callback_module
from spec_export.training.compare import live_cast, rows_of
from spec_export.training.draft_config import checkpoint_config
from spec_export.training.hook import TrainingEvent
from tests.e2e.test_training_export import Calls, exporter, manifest
from tests.helpers.cli import spec_export
from tests.helpers.tiny import Tiny, run_training

KEYS = ("training_vs_target_greedy", "serving_vs_target_greedy")


def test_acceptance_is_in_the_manifest_on_the_screen_and_on_the_card(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports = exporter(tmp_path, compare={"on": "checkpoint"})
    run_training(tiny.flags(tmp_path / "run", "--epochs", "2"), exports)
    assert exports.errors == []
    legs = [manifest(r.folder)["comparison"]["layout"] for r in exports.results]
    kinds = ("training", "validation")  # the first save is before any validation
    for leg, kind in zip(legs, kinds, strict=True):
        assert leg["verdict"] == "pass" and leg["positions"] == 256
        trained, served = (leg["acceptance"][key] for key in KEYS)
        assert 1 <= trained == served < 4
        told = f"128 rows recorded from a batch of {kind}, 128 from a seed"
        assert told in leg["notes"]
        counted = [note for note in leg["notes"] if note.startswith("acceptance: ")]
        assert f"along the text of {kind}" in counted[0]
        assert "the target's greedy choice" in counted[0]
    # Ten steps over 60 rows: the draft knows the text it is trained with.
    assert legs[0]["acceptance"][KEYS[0]] > 1.5

    folder = exports.results[-1].folder
    kept = json.dumps(legs[-1]["acceptance"])
    final = spec_export("finalize", tmp_path / "exports", "--target", tiny.target)
    assert final.code == 0, final.data["findings"]
    again = manifest(folder)["comparison"]["layout"]
    assert json.dumps(again["acceptance"]) == kept  # of text that did not travel
    assert [n for n in again["notes"] if n.startswith("acceptance: ")] == counted
    words = f"{trained:.2f} tokens per round as trained, {served:.2f} as served"
    assert f"| acceptance length | {words}" in (folder / "README.md").read_text()
    capsys.readouterr()
    assert cli.run(["show", str(folder)]) == 0
    assert f"acceptance: {words}" in capsys.readouterr().out


def test_what_travels_holds_no_text_of_the_training(tiny: Tiny, tmp_path: Path) -> None:
    exports = exporter(tmp_path, compare={"on": "checkpoint"})
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "2"), exports)
    (result,) = exports.results
    probe = load_file(result.folder / "probe" / "probe.safetensors")
    assert set(probe) == {
        "log_sums",
        "projections",
        "ranges",
        "top_ids",
        "top_values",
    }
    record = json.loads((result.folder / "probe" / "probe.json").read_text())
    assert record["inputs"]["from"] == "seed" and record["inputs"]["positions"] == 128
    target = ("--target", tiny.target, "--compare")
    verified = spec_export("verify", result.folder, *target)
    assert verified.code == 0, verified.data["findings"]


def test_the_target_s_choice_is_what_the_target_says(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Batches as speculators collates them, against transformers' own forward."""
    held: list[Any] = []

    def look(event: TrainingEvent) -> None:
        if event.reason == "step":
            config = checkpoint_config(event.trainer.model.config, "bfloat16")
            held.append(rows_of(config, 256, event.batch))

    run_training(tiny.flags(tmp_path / "run", "--max-steps", "1"), Calls(look))
    (rows,) = held
    about = json.loads((tiny.target / "config.json").read_text())
    choice = target_choice(rows, tiny.target, about, torch.device("cpu"))
    assert choice is not None and rows.recorded == 128

    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    texts = [row["input_ids"] for row in load_from_disk(str(tiny.data))]
    right = wrong = known = 0
    tokens = rows.token_ids[: rows.recorded]
    for document in rows.document_ids[: rows.recorded].unique():
        at = (rows.document_ids[: rows.recorded] == document).nonzero().reshape(-1)
        some = tokens[at].tolist()
        # Where in which text this piece is; its first token's predecessors count too.
        text, start = next(
            (text, start)
            for text in texts
            for start in range(len(text))
            if text[start : start + len(some)].tolist() == some
        )
        with torch.no_grad():
            said = model(text[None]).logits[0].argmax(-1)
        expected = said[start : start + len(some)]
        right += int((choice[at] == expected).sum())
        wrong += int((choice[at][:-1] == expected[1:]).sum())
        known += len(some)
    assert known == 128
    assert right >= 125  # hidden states are stored in bfloat16
    assert wrong < 64  # the control: one place off


def test_which_batch_an_event_has(tiny: Tiny, tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(event: TrainingEvent) -> None:
        seen.append((event.reason, event.batch and event.batch.kind))

    flags = ("--max-steps", "1", "--epochs", "2")
    run_training(tiny.flags(tmp_path / "run", *flags), Calls(look))
    assert seen[:5] == [
        ("start", None),
        ("step", "training"),
        ("epoch", "training"),
        ("best", "validation"),
        ("step", "validation"),
    ]
    assert seen[-1] == ("end", "validation")


def test_the_clock_is_looked_at_where_it_may_be_short(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    seconds = iter((0.1, 6.0, 0.1))

    def watched(model: Any, config: Any, batch: Any, limit: float | None) -> Any:
        limits.append(limit)
        found = live_cast(model, config, batch, limit)
        leg = replace(found.leg, seconds=next(seconds))
        return replace(found, leg=leg)

    monkeypatch.setattr(callback_module, "live_cast", watched)
    compare = {"positions": 16, "max_seconds": 10}
    exports = exporter(tmp_path, every={"steps": 1}, compare=compare, when_busy="wait")
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "3"), exports)
    # The first, then one after a fast one, then one after one that took half of it.
    assert exports.errors == [] and limits == [10, None, 10]


def test_a_batch_that_cannot_be_kept_costs_nothing_but_itself(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> Any:
        raise RuntimeError("no such key")

    monkeypatch.setattr(batches, "stretch", fail)
    exports = exporter(tmp_path, compare={"on": "checkpoint", "positions": 32})
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "1"), exports)
    assert exports.errors == []
    leg = exports.results[0].manifest.comparison["layout"]
    assert leg.verdict == "pass" and leg.acceptance is None
    assert "32 rows from a seed, none from a batch of a training" in leg.notes
