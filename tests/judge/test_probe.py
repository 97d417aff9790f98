"""The probe that travels, and what can be said without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Draft, make_draft, serving_tensors, write_export
from safetensors.torch import save_file

from spec_export.findings import SpecExportError
from spec_export.judge import (
    Inputs,
    layout_leg,
    load_probe,
    not_run,
    probe_leg,
)
from spec_export.judge.seeded import digest


@pytest.fixture(scope="module")
def draft() -> Draft:
    return make_draft(2, 48, norm_output=True)


def export(folder: Path, draft: Draft, inputs: Inputs) -> Path:
    write_export(folder, draft)
    leg = layout_leg(
        folder,
        draft.module,
        inputs,
        embed=draft.embed,
        write_probe=True,
        probe_metadata={"by": "a test"},
    )
    assert leg.passed, leg.reason
    return folder


def recorded(draft: Draft) -> Inputs:
    inputs = draft.inputs(positions=60, seed=9)
    batch = {
        "hidden_states": inputs.aux[None],
        "input_ids": inputs.token_ids[None],
        "document_ids": inputs.document_ids[None],
        "position_ids": inputs.position_ids[None],
    }
    return Inputs.from_batch(batch, positions=40)


@pytest.mark.parametrize("kind", ["seed", "stored"])
def test_a_deployer_repeats_the_leg(tmp_path: Path, draft: Draft, kind: str) -> None:
    inputs = draft.inputs() if kind == "seed" else recorded(draft)
    folder = export(tmp_path, draft, inputs)
    probe = load_probe(folder)
    assert torch.equal(probe.inputs.aux, inputs.aux)
    assert probe.metadata == {"by": "a test"}
    leg = probe_leg(folder, probe, embed=draft.embed)
    assert leg.passed, leg.reason
    assert leg.positions == 40 and len(leg.metrics) == 3
    assert all(m.top1 == 1 and m.max_rel < 1e-5 for m in leg.metrics)
    assert [p.name for p in folder.glob("*.safetensors")] == ["model.safetensors"]


BROKEN: dict[str, dict[str, Any]] = {
    "norm_output": {"norm_output": False},
    "rope": {"rope_theta": 10000.0, "rope_parameters": None},
    "eps": {"rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_config_broken_later_fails(tmp_path: Path, draft: Draft, how: str) -> None:
    folder = export(tmp_path, draft, draft.inputs())
    write_export(folder, draft, **BROKEN[how])
    leg = probe_leg(folder, load_probe(folder), embed=draft.embed)
    assert leg.verdict == "fail"


def test_tensors_broken_later_fail(tmp_path: Path, draft: Draft) -> None:
    folder = export(tmp_path, draft, draft.inputs())
    probe = load_probe(folder)
    good = serving_tensors(draft)
    for name, value in {
        # The row of a token that is never among the largest changes nothing else.
        "lm_head.weight": good["lm_head.weight"].index_fill(0, torch.tensor(5), 0.0),
        "d2t": good["d2t"] + (torch.arange(48) == 5),
        "layers.1.hidden_norm.weight": torch.ones(32),
    }.items():
        write_export(folder, draft, tensors={**good, name: value})
        assert probe_leg(folder, probe, embed=draft.embed).verdict == "fail", name
    write_export(folder, draft)
    assert probe_leg(folder, probe, embed=draft.embed.roll(1, 0)).verdict == "fail"
    assert probe_leg(folder, probe, embed=draft.embed).passed


def test_a_failed_leg_leaves_no_probe(tmp_path: Path, draft: Draft) -> None:
    write_export(tmp_path, draft, norm_output=False)
    layout_leg(
        tmp_path, draft.module, draft.inputs(), embed=draft.embed, write_probe=True
    )
    with pytest.raises(SpecExportError) as caught:
        load_probe(tmp_path)
    assert caught.value.findings[0].code == "file-missing"


def test_a_broken_probe_is_an_error(tmp_path: Path, draft: Draft) -> None:
    folder = export(tmp_path, draft, draft.inputs())
    record = json.loads((folder / "probe/probe.json").read_text())
    for change in (
        {"schema": "other"},
        {"inputs": {**record["inputs"], "seed": 4}},
        {"inputs": {"from": "seed"}},
        {"tolerance": 3},
    ):
        (folder / "probe/probe.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(SpecExportError) as caught:
            load_probe(folder)
        assert caught.value.findings[0].code == "file-corrupt"
    (folder / "probe/probe.json").write_text(json.dumps(record))
    load_probe(folder)
    (folder / "probe/probe.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(SpecExportError):
        load_probe(folder)


def test_the_probe_of_a_large_target_is_small() -> None:
    """Recorded features of an 8B target (3 x 4096 wide) stay below 8 MB."""
    rows, width = 2048, 3 * 4096
    batch = {
        "hidden_states": torch.zeros(1, rows, width),
        "input_ids": torch.zeros(1, rows, dtype=torch.long),
        "document_ids": torch.zeros(1, rows, dtype=torch.long),
        "position_ids": torch.arange(1, rows + 1)[None],
    }
    assert len(Inputs.from_batch(batch, positions=256)) == 256
    kept = Inputs.from_batch(batch, positions=rows)
    logits = 3 * 64 * 8 + 3 * 9 * 8 + 3 * 8
    assert len(kept) * (2 * width + logits + 24) < 8_000_000


def test_seeded_rows_are_the_same_everywhere() -> None:
    """The bits themselves: a change of torch that moved them would be seen."""
    inputs = Inputs.random(vocab_size=1000, aux_width=24, positions=20, seed=1)
    assert inputs.token_ids[:4].tolist() == EXPECTED_TOKENS
    assert digest(inputs.aux)[:16] == EXPECTED_DIGEST
    other = Inputs.random(vocab_size=1000, aux_width=24, positions=20, seed=2)
    assert not torch.equal(inputs.aux, other.aux)
    assert inputs.document_ids.unique().tolist() == [0, 1, 2, 3]
    assert inputs.position_ids[0] == 1
    assert len(replace(inputs, seed=None).first(7)) == 7


EXPECTED_TOKENS = [642, 694, 853, 218]
EXPECTED_DIGEST = "7add0480571c0de3"


def test_a_target_folder_is_opened(tmp_path: Path, draft: Draft) -> None:
    folder = export(tmp_path / "export", draft, draft.inputs())
    target = tmp_path / "target"
    target.mkdir()
    save_file(
        {
            "model.language_model.embed_tokens.weight": draft.embed,
            "vision.embed_tokens.weight": torch.zeros(4, 4),
            "lm_head.weight": draft.embed.flip(0).contiguous(),
        },
        target / "model.safetensors",
    )
    leg = layout_leg(folder, draft.module, draft.inputs(), target=target)
    assert leg.passed, leg.reason
    (target / "model.safetensors").unlink()
    leg = layout_leg(folder, draft.module, draft.inputs(), target=target)
    assert leg.verdict == "not run" and "no embedding" in leg.reason
    assert [f.code for f in leg.findings] == ["comparison-not-run"]


def test_what_cannot_be_compared_is_not_a_pass(tmp_path: Path, draft: Draft) -> None:
    for config, verdict in (
        ({"architectures": ["DFlashDraftModel"]}, "not run"),
        ({"model_type": "qwen3"}, "not run"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "not run"),
        ({"rope_scaling": {"rope_type": "none such"}}, "fail"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "fail"),
        ({"model_type": ...}, "fail"),
    ):
        folder = write_export(tmp_path, draft, **config)
        leg = layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed)
        assert (leg.verdict, leg.passed) == (verdict, False), config
        assert leg.reason
    leg = layout_leg(write_export(tmp_path, draft), draft.module, draft.inputs())
    assert leg.verdict == "fail" and "embedding is not at hand" in leg.reason


def test_legs_as_json(tmp_path: Path, draft: Draft) -> None:
    folder = export(tmp_path, draft, draft.inputs())
    leg = layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed)
    said = json.loads(json.dumps(leg.to_json()))
    assert said["ran"] is True and said["verdict"] == "pass"
    assert said["tolerance"]["max_rel"] == 1e-5
    assert said["tolerance"]["source"] == "fixed: float32, small shapes"
    assert [m["step"] for m in said["metrics"]] == [0, 1, 2]
    assert set(said["metrics"][0]) == {
        "step",
        "max_abs",
        "max_rel",
        "kl_mean",
        "kl_max",
        "kl_max_position",
        "top1",
    }
    never = not_run("engine", "no SGLang here").to_json()
    assert never["ran"] is False and never["verdict"] == "not run"
    assert never["reason"] == "no SGLang here"


def test_saying_not_run_needs_no_torch() -> None:
    code = (
        "import sys, spec_export.judge as j; j.not_run('layout', 'no torch');"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
