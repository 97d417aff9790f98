"""A uniform window: given by the launch flag, judged with it, said with its limits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafts import make_draft, write_export
from safetensors.torch import load_file, save_file

from spec_export import cli
from spec_export.comparison import WINDOW_FLAG, window_of
from spec_export.judge import layout_leg
from spec_export.training.compare import empty_draft, live_cast, live_judge
from spec_export.training.recipe import CallbackConfig
from tests.helpers import field

WINDOW = 4
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW}


def finalize(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    target = field.make_target(root / "target")
    checkpoint = field.make_draft(root / "checkpoint", target, layer=SLIDING)
    capsys.readouterr()
    flags = ["--target", str(target), "--output", str(root / "export"), "--json"]
    code = cli.run(["finalize", str(checkpoint), *flags])
    return code, json.loads(capsys.readouterr().out)


def test_finalize_and_verify_take_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = finalize(tmp_path, capsys)
    assert (code, said["verdict"]) == (0, "pass")
    severities = {f["code"]: f["severity"] for f in said["findings"]}
    assert severities["sliding-window-flag"] == "warning"
    export = tmp_path / "export"
    manifest = json.loads((export / "spec_export_manifest.json").read_text())
    assert manifest["deviations"] == []
    assert window_of(export) == WINDOW - 1
    leg = manifest["comparison"]["layout"]
    assert leg["positions"] > 10 * WINDOW  # documents longer than the window
    assert any("to within one position" in note for note in leg["notes"])
    again = ["verify", str(export), "--target", str(tmp_path / "target"), "--compare"]
    assert cli.run(again) == 0


def test_without_the_flag_finalize_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spec_export.comparison.window_of", lambda _: None)
    code, said = finalize(tmp_path, capsys)
    assert code == 1
    errors = [f for f in said["findings"] if f["severity"] == "error"]
    assert [f["code"] for f in errors] == ["comparison-failed"]
    assert "attention window" in errors[0]["hint"]


@pytest.mark.parametrize("flag", [True, False])
def test_training_takes_the_flag(tmp_path: Path, flag: bool) -> None:
    draft = make_draft(1, layer=SLIDING)
    folder = write_export(tmp_path / "export", draft)
    launch = ["--speculative-algorithm", "EAGLE3"]
    launch += ["--speculative-draft-model-path", "{draft}"]
    launch += [WINDOW_FLAG, str(WINDOW - 1)] if flag else []
    tensors = load_file(folder / "model.safetensors")
    embedded = json.dumps({"serving": {"launch": launch}})
    save_file(tensors, folder / "model.safetensors", {"spec_export.manifest": embedded})
    values = draft.weights
    snapshot: Any = SimpleNamespace(
        config=draft.config, tensors=values, rounded=values.__getitem__
    )
    config = CallbackConfig(output_dir=tmp_path / "out", dtype="float32")
    cast = live_cast(draft.module, config, None)
    judge = live_judge(
        cast, empty_draft(draft.config), snapshot, None, config, lambda: False
    )
    legs = judge(folder)
    assert legs["cast"].passed
    assert legs["layout"].verdict == ("pass" if flag else "fail")


def test_a_window_that_no_document_reaches_is_no_note(tmp_path: Path) -> None:
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 100}
    draft = make_draft(1, layer=layer)
    folder = write_export(tmp_path, draft)
    inputs = draft.inputs()
    leg = layout_leg(folder, draft.module, inputs, embed=draft.embed, window=99)
    assert leg.passed and leg.notes == (inputs.described(),)
