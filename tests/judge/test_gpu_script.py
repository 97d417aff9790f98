"""The script for a GPU works: the same code on a CPU, with tiny shapes."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu import check_8b


def test_the_script_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_8b.main(["--device", "cpu", "--tiny"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["wrong"] == [] and len(said["rows"]) == 8
    assert {(r["leg"], r["dtype"]) for r in said["rows"]} == {
        (leg, dtype) for leg in ("cast", "layout") for dtype in ("float32", "bfloat16")
    }
    layout = [r for r in said["rows"] if r["leg"] == "layout"]
    assert all(0 < r["probe_bytes"] < 8_000_000 for r in layout)
    assert layout[0]["tolerance"] == 1e-5
    assert "bfloat16 arithmetic" in layout[1]["tolerance_from"]


def test_the_script_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_8b.write_export

    def broken(folder: object, config: object, values: dict[str, object]) -> None:
        real(folder, config, {**values, "norm.weight": torch.ones(64).bfloat16()})

    monkeypatch.setattr(check_8b, "write_export", broken)
    assert check_8b.main(["--device", "cpu", "--tiny"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert len(said["wrong"]) == 4
    assert said["wrong"][0].startswith("layout, 1 layers, float32: fail: logits differ")
