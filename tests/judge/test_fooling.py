"""Attempts to get a pass that is not deserved, by mistake or on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Draft, make_draft, serving_tensors, write_export
from safetensors.torch import load_file, save_file

from spec_export import cli
from spec_export.findings import SpecExportError
from spec_export.judge import Inputs, Leg, Tolerance, layout_leg, load_probe, probe_leg
from spec_export.judge.checks import captured_layers

TARGET = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def draft() -> Draft:
    return make_draft(2, norm_output=True, norm_before_fc=True)


def judge(folder: Path, draft: Draft, inputs: Inputs | None = None, **more: Any) -> Leg:
    rows = inputs if inputs is not None else draft.inputs(positions=20)
    more.setdefault("embed", draft.embed)
    return layout_leg(folder, draft.module, rows, **more)


def probed(folder: Path, draft: Draft) -> Path:
    leg = judge(write_export(folder, draft), draft, write_probe=True)
    assert leg.passed, leg.reason
    return folder


# --- the probe ------------------------------------------------------------------------


def edit_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "probe/probe.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def edit_logits(folder: Path, change: Callable[[Tensors], None]) -> None:
    path = folder / "probe/probe.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_raised_tolerance_is_not_believed(tmp_path: Path, draft: Draft) -> None:
    folder = probed(tmp_path, draft)
    edit_record(folder, lambda r: r["tolerance"].update(max_rel=1e9, max_kl=1e9))
    assert probe_leg(folder, load_probe(folder), embed=draft.embed).passed
    write_export(folder, draft, rms_norm_eps=1e-4)
    leg = probe_leg(folder, load_probe(folder), embed=draft.embed)
    assert leg.verdict == "fail"
    assert leg.tolerance is not None and leg.tolerance.max_rel == 1e-5
    # Where noise has to be allowed for, as much as an honest run measures.
    probe = load_probe(folder)
    assert probe.believed().max_rel == 1e-3
    assert "is not believed" in probe.believed().source
    assert replace(probe, dtype="bfloat16").believed().max_rel == 0.1
    honest = Tolerance(1e-4, "calibrated")
    assert replace(probe, tolerance=honest).believed() == honest


def test_a_raised_range_is_not_believed(tmp_path: Path, draft: Draft) -> None:
    folder = probed(tmp_path, draft)
    edit_logits(folder, lambda t: t.update(ranges=t["ranges"] * 1e9))
    write_export(folder, draft, rms_norm_eps=1e-4)
    leg = probe_leg(folder, load_probe(folder), embed=draft.embed)
    assert leg.verdict == "fail"


@pytest.mark.parametrize("name", ["top_values", "log_sums", "projections"])
def test_changed_logits_in_the_probe(tmp_path: Path, draft: Draft, name: str) -> None:
    folder = probed(tmp_path, draft)
    edit_logits(folder, lambda t: t.update({name: t[name] + 0.01}))
    assert probe_leg(folder, load_probe(folder), embed=draft.embed).verdict == "fail"
    edit_logits(folder, lambda t: t.update({name: t[name] * torch.nan}))
    assert probe_leg(folder, load_probe(folder), embed=draft.embed).verdict == "fail"


def no_steps(tensors: Tensors) -> None:
    for name, value in tensors.items():
        tensors[name] = value[:0].clone()


def one_row(tensors: Tensors) -> None:
    for name in ("top_ids", "top_values", "log_sums", "projections"):
        tensors[name] = tensors[name][:, :1].clone()


@pytest.mark.parametrize("cut", [no_steps, one_row])
def test_a_probe_of_nothing_is_broken(
    tmp_path: Path, draft: Draft, cut: Callable[[Tensors], None]
) -> None:
    folder = probed(tmp_path, draft)
    edit_logits(folder, cut)
    if cut is no_steps:
        edit_record(folder, lambda r: r.update(steps=0))
    with pytest.raises(SpecExportError) as caught:
        load_probe(folder)
    assert caught.value.findings[0].code == "file-corrupt"


def test_the_probe_of_another_draft(tmp_path: Path, draft: Draft) -> None:
    folder = probed(tmp_path / "mine", draft)
    other = make_draft(2, norm_output=True, norm_before_fc=True, seed=1)
    probed(tmp_path / "other", other)
    shutil.rmtree(folder / "probe")
    shutil.copytree(tmp_path / "other/probe", folder / "probe")
    assert probe_leg(folder, load_probe(folder), embed=draft.embed).verdict == "fail"


# --- the export -----------------------------------------------------------------------


def test_permuted_layers(tmp_path: Path, draft: Draft) -> None:
    """Only what has one shape in both layers; the rest would not load."""
    tensors = serving_tensors(draft)
    for name in ("mlp.up_proj", "self_attn.o_proj", "post_attention_layernorm"):
        one, other = f"layers.0.{name}.weight", f"layers.1.{name}.weight"
        tensors[one], tensors[other] = tensors[other], tensors[one]
    leg = judge(write_export(tmp_path, draft, tensors=tensors), draft)
    assert leg.verdict == "fail"
    assert "holds what training calls layers.1" in " ".join(leg.diagnosis)


def test_strange_names_change_nothing_and_are_named(
    tmp_path: Path, draft: Draft
) -> None:
    tensors = serving_tensors(draft) | {"layers.7.mlp.up_proj.weight": torch.ones(3)}
    leg = judge(write_export(tmp_path, draft, tensors=tensors), draft)
    assert leg.passed
    assert "SGLang drops: layers.7.mlp.up_proj.weight" in " ".join(leg.notes)


def test_a_permuted_draft_vocabulary_is_the_same_draft(
    tmp_path: Path, draft: Draft
) -> None:
    tensors = serving_tensors(draft)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    ids = tensors["d2t"] + torch.arange(48)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = ids[order] - torch.arange(48)
    folder = probed(tmp_path, draft)
    write_export(folder, draft, tensors=tensors)
    again = probe_leg(folder, load_probe(folder), embed=draft.embed)
    for leg in (judge(folder, draft), again):
        assert leg.passed, leg.reason
        assert any("in another order" in note for note in leg.notes)
    for name in ("lm_head.weight", "d2t"):  # one without the other
        alone = {**tensors, name: serving_tensors(draft)[name]}
        write_export(folder, draft, tensors=alone)
        assert judge(folder, draft).verdict == "fail"
        leg = probe_leg(folder, load_probe(folder), embed=draft.embed)
        assert leg.verdict == "fail"


def test_columns_of_one_feature_zeroed(tmp_path: Path) -> None:
    draft = make_draft(1, fc_norm=True)
    tensors = serving_tensors(draft)
    fc = tensors["fc.weight"].clone()
    fc[:, 64:] = 0
    folder = write_export(tmp_path, draft, tensors={**tensors, "fc.weight": fc})
    assert judge(folder, draft).verdict == "fail"
    # If training does not use the feature either, its norm is free.
    draft.module.fc.weight.data = fc
    free = {**tensors, "fc.weight": fc, "fc_norm.2.weight": torch.ones(32)}
    assert judge(write_export(tmp_path, draft, tensors=free), draft).passed


@pytest.mark.parametrize("stale", [True, False])
def test_a_doubled_shard(tmp_path: Path, draft: Draft, stale: bool) -> None:
    """Which of two tensors stays depends on the order of the files."""
    folder = write_export(tmp_path, draft)
    tensors = serving_tensors(draft)
    copy = {"norm.weight": tensors["norm.weight"] * (2 if stale else 1)}
    save_file(copy, folder / "a.safetensors")
    leg = judge(folder, draft)
    assert leg.verdict == "fail"
    assert "two tensors of the export set norm.weight" in leg.reason


@pytest.mark.parametrize("eps", [1e-6, 2e-5])
def test_a_slightly_different_eps(tmp_path: Path, draft: Draft, eps: float) -> None:
    leg = judge(write_export(tmp_path, draft, rms_norm_eps=eps), draft)
    assert leg.verdict == "fail"


def test_a_window_without_its_flag(tmp_path: Path) -> None:
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    draft = make_draft(1, layer=layer)
    folder = write_export(tmp_path, draft)
    assert judge(folder, draft, window=3).passed
    for wrong in (None, 2, 4):
        assert judge(folder, draft, window=wrong).verdict == "fail"


def test_the_wrong_target_of_the_same_shape(tmp_path: Path, draft: Draft) -> None:
    other = draft.embed.clone()
    other[int(draft.inputs(20).token_ids[5]), 3] += 0.1  # RMSNorm undoes a factor
    leg = judge(write_export(tmp_path, draft), draft, embed=other)
    assert leg.verdict == "fail"
    assert "embed_tokens.weight (the target's) differs" in " ".join(leg.diagnosis)


@pytest.mark.parametrize(
    ("ids", "passes"),
    [([1, 3, 4], True), ([2, 4, 5], False), ([1, 3, 5], False), (None, True)],
)
def test_features_of_other_layers(
    tmp_path: Path, draft: Draft, ids: list[int] | None, passes: bool
) -> None:
    """Both sides get the same features, whichever layers SGLang would take."""
    eagle = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    more: dict[str, Any] = eagle if ids else {}
    folder = write_export(tmp_path, draft, **more)
    leg = judge(folder, draft, target_config=TARGET)
    assert leg.passed is passes
    assert passes or "SGLang would take the features after layers" in leg.reason


@pytest.mark.parametrize(
    ("architecture", "release", "ids", "layers"),
    [
        ("LlamaForCausalLM", "0.5.23", [1, 3, 6], [2, 4, 7]),
        ("DeepseekV3ForCausalLM", "0.5.23", [1, 3, 6], [2, 4, 7]),
        ("DeepseekV3ForCausalLM", "0.5.23", [3, 6, 2], [2, 3, 6]),
        ("DeepseekV3ForCausalLM", "0.5.12", [3, 6, 2], [3, 4, 7]),
        ("GptOssForCausalLM", "0.5.23", [2, 5, 8], [2, 5, 8]),
        ("GptOssForCausalLM", "0.5.16", [2, 5, 7], [3, 6, 8]),
        ("LlamaForCausalLM", "0.5.23", None, [2, 4, 5]),
        ("MiniMaxM3SparseForConditionalGeneration", "0.5.23", None, [3, 5, 6]),
    ],
)
def test_which_layers_a_target_hands_over(
    architecture: str, release: str, ids: list[int] | None, layers: list[int]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }
    target = {"architectures": [architecture], "text_config": {"num_hidden_layers": 8}}
    assert captured_layers(config, target, release) == layers
    config["eagle_config"]["use_aux_hidden_state"] = False
    assert captured_layers(config, target, release) == [8]


def test_tensors_of_another_dtype_than_the_config(tmp_path: Path, draft: Draft) -> None:
    """bfloat16 values fit into float16, so no weight tells; the arithmetic would."""
    rounded = {
        k: v.bfloat16() if v.is_floating_point() else v
        for k, v in serving_tensors(draft).items()
    }
    folder = write_export(tmp_path, draft, tensors=rounded, dtype="float16")
    leg = judge(folder, draft, saved_dtype=torch.bfloat16)
    assert leg.verdict == "fail"
    assert "holds bfloat16, and SGLang computes in float16" in leg.reason
    folder = write_export(tmp_path, draft, tensors=rounded, dtype="bfloat16")
    assert judge(folder, draft, saved_dtype=torch.bfloat16).passed


# --- rows and logits that tell nothing ------------------------------------------------


@pytest.mark.parametrize("what", ["zeros", "one row", "one token", "padding", "nan"])
def test_rows_that_tell_nothing(tmp_path: Path, draft: Draft, what: str) -> None:
    rows = replace(draft.inputs(positions=20), seed=None)
    rows = {
        "zeros": replace(rows, aux=torch.zeros_like(rows.aux)),
        "one row": replace(rows, aux=rows.aux[:1].expand_as(rows.aux)),
        "one token": replace(rows, token_ids=torch.full_like(rows.token_ids, 3)),
        "padding": replace(rows, document_ids=torch.full_like(rows.document_ids, -1)),
        "nan": replace(rows, aux=rows.aux * torch.nan),
    }[what]
    leg = judge(write_export(tmp_path, draft), draft, rows)
    assert leg.verdict == "not run"
    assert "the comparison would show nothing" in leg.reason
    assert [f.code for f in leg.findings] == ["comparison-not-run"]


def test_a_draft_that_says_nothing(tmp_path: Path) -> None:
    draft = make_draft(1)
    draft.module.lm_head.weight.data.zero_()
    leg = judge(write_export(tmp_path, draft), draft)
    assert leg.verdict == "not run" and "the same in every row" in leg.reason


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    draft = make_draft(1)
    draft.module.norm.weight.data[3] = torch.nan
    leg = judge(write_export(tmp_path, draft), draft)
    assert leg.verdict == "fail"
    json.dumps(leg.to_json(), allow_nan=False)  # a manifest can hold it


def test_one_huge_logit_does_not_hide_the_others(tmp_path: Path) -> None:
    """Of a range of a million, a difference of one is within 1e-5."""
    draft = make_draft(1)
    head = draft.module.lm_head.weight.data
    head[7] *= 1e6
    tensors = serving_tensors(draft)
    assert judge(write_export(tmp_path, draft, tensors=tensors), draft).passed
    tensors["lm_head.weight"] = head.clone()
    tensors["lm_head.weight"][11] *= 1.1
    leg = judge(write_export(tmp_path, draft, tensors=tensors), draft)
    assert leg.verdict == "fail"
    assert "KL" in leg.reason


def test_fewer_rows_than_asked_are_said(tmp_path: Path, draft: Draft) -> None:
    rows = draft.inputs(positions=300)
    leg = judge(write_export(tmp_path, draft), draft, rows, max_seconds=1e-3)
    assert leg.passed and leg.positions < 300
    assert [f.code for f in leg.findings] == ["comparison-reduced"]


# --- the folder, as a deployer gets it ------------------------------------------------


def verify(
    capsys: pytest.CaptureFixture[str], folder: Path, target: Path, *more: str
) -> tuple[int, dict[str, Any], set[str]]:
    capsys.readouterr()
    code = cli.run(["verify", str(folder), "--target", str(target), "--json", *more])
    said = json.loads(capsys.readouterr().out)
    errors = {f["code"] for f in said["findings"] if f["severity"] == "error"}
    return code, said, errors


def swap_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-2:] = b"\x11\x3f"
    path.write_bytes(raw)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "spec_export_manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def claim_pass(content: dict[str, Any]) -> None:
    content["comparison"]["layout"]["metrics"][1]["max_rel"] = 0.3


def claim_without_numbers(content: dict[str, Any]) -> None:
    content["comparison"]["cast"] = {"ran": True, "verdict": "pass"}


def hide_a_failure(content: dict[str, Any]) -> None:
    content["comparison"]["layout"]["verdict"] = "fail"


def test_the_export_is_swapped_after_it_was_judged(
    tmp_path: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "export")
    code, said, errors = verify(capsys, folder, finished[1], "--compare")
    assert (code, said["verdict"], errors) == (0, "pass", set())
    swap_weights(folder)
    for more in ((), ("--compare",), ("--files-only",)):
        code, said, errors = verify(capsys, folder, finished[1], *more)
        assert code == 1 and said["verdict"] == "not run"
        assert errors


@pytest.mark.parametrize("change", [claim_pass, claim_without_numbers, hide_a_failure])
def test_a_manifest_that_contradicts_itself(
    tmp_path: Path,
    finished: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "export")
    edit_manifest(folder, change)
    code, _, errors = verify(capsys, folder, finished[1])
    assert code == 1 and errors == {"manifest-invalid"}
