"""MTP heads: what SGLang's classes compute from our exports is what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_export.artifact.target import open_target
from spec_export.comparison import leg_of_probe
from spec_export.export import ExportResult
from spec_export.findings import SpecExportError
from spec_export.judge.compare import largest
from spec_export.judge.verdict import Leg
from tests.helpers.judging import Tensors, exported, judged_again
from tests.helpers.mtp import (
    EXPERTS,
    FIRST_STEP,
    HIDDEN,
    STEPS,
    TARGETS,
    make_mtp,
    make_target,
)
from tests.helpers.record import record

JUDGED = 1e-5


def export(root: Path, kind: str, **options: Any) -> tuple[ExportResult, Leg]:
    make_mtp(root / "checkpoint", make_target(root / "target", kind), kind)
    return exported(root, **options)


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, ExportResult, Leg]]:
    made: dict[str, tuple[Path, ExportResult, Leg]] = {}

    def get(kind: str) -> tuple[Path, ExportResult, Leg]:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            made[kind] = (root, *export(root, kind, allow=(FIRST_STEP,)))
        return made[kind]

    return get


Exports = Callable[[str], tuple[Path, ExportResult, Leg]]


@pytest.mark.parametrize("kind", TARGETS)
def test_layers_are_exact(exports: Exports, kind: str) -> None:
    root, result, leg = exports(kind)
    assert leg.passed, (leg.reason, leg.diagnosis)
    assert len(leg.metrics) == STEPS and largest(leg.metrics) <= JUDGED
    record("judge", kind, f"{largest(leg.metrics):.1e}")
    again = leg_of_probe(result.folder, open_target(root / "target"), "cpu", None)
    assert again.passed, again.reason


def _of_keys(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says of the keys of another one, but for the dtype."""
    return {
        key: _of_keys(config[key], inner) if isinstance(inner, dict) else config[key]
        for key, inner in keys.items()
        if key != "dtype"
    }


@pytest.mark.parametrize("kind", TARGETS)
def test_the_folder_is_what_the_target_s_class_reads(
    exports: Exports, kind: str
) -> None:
    root, result, _ = exports(kind)
    config = json.loads((result.folder / "config.json").read_text())
    target = json.loads((root / "target" / "config.json").read_text())
    assert _of_keys(config, target) == _of_keys(target, target)
    # What SGLang's own configuration classes read of RoPE is beside the newer form.
    rope = target.get("text_config", target)["rope_parameters"]
    beside = config.get("text_config", config)
    assert beside["rope_theta"] == rope["rope_theta"]
    assert beside["partial_rotary_factor"] == rope["partial_rotary_factor"]
    names = set(load_file(result.folder / "model.safetensors"))
    assert all(name.startswith("mtp.") for name in names)
    fused = load_file(root / "checkpoint" / "model.safetensors")
    both = fused.get("mtp_layers.0.mlp.experts.gate_up_proj")
    assert (both is None) == (kind == "qwen3_5_text")
    if both is not None:
        written = load_file(result.folder / "model.safetensors")
        for expert in range(EXPERTS):
            name = f"mtp.layers.0.mlp.experts.{expert}"
            gate, up = both[expert].chunk(2)
            assert torch.equal(written[f"{name}.gate_proj.weight"], gate)
            assert torch.equal(written[f"{name}.up_proj.weight"], up)


def test_the_first_step_is_a_deviation_with_a_size(
    exports: Exports, tmp_path: Path
) -> None:
    with pytest.raises(SpecExportError) as caught:
        export(tmp_path, "qwen3_next")
    assert [f.code for f in caught.value.findings] == [FIRST_STEP]
    _, result, leg = exports("qwen3_next")
    assert [d.code for d in result.manifest.deviations] == [FIRST_STEP]
    (note,) = [n for n in leg.notes if n.startswith(FIRST_STEP)]
    share = float(note.split("differ by ")[1].split(" of their range")[0])
    assert share > 1e-3


def _swap(a: str, b: str) -> Callable[[Tensors], None]:
    def mistake(tensors: Tensors) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return mistake


def _halves(tensors: Tensors) -> None:
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(HIDDEN, 1)


def _drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(n) for n in list(tensors) if name in n] and None


EXPERT = "mtp.layers.0.mlp.experts"
MISTAKES: dict[str, Callable[[Tensors], None]] = {
    "input halves swapped": _halves,
    "norms before fc swapped": _swap(
        "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"
    ),
    "final norm missing": _drop("mtp.norm"),
    "gate and up swapped": _swap(
        f"{EXPERT}.1.gate_proj.weight", f"{EXPERT}.1.up_proj.weight"
    ),
    "two experts swapped": _swap(
        f"{EXPERT}.0.down_proj.weight", f"{EXPERT}.2.down_proj.weight"
    ),
    "an expert missing": _drop(f"{EXPERT}.2"),
    "names of training": lambda t: t.update(
        {"mtp.layers.0.final_layernorm.weight": t.pop("mtp.norm.weight")}
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_caught(tmp_path: Path, exports: Exports, name: str) -> None:
    root, _, _ = exports("qwen3_next")
    leg = judged_again(root, tmp_path / "broken", lambda t, _: MISTAKES[name](t))
    assert leg.verdict == "fail", leg
