"""What a release of SGLang reads of a folder, and what it does with the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import THETA, make_draft, serving_config, serving_tensors, write_export
from safetensors.torch import save_file

from spec_export.judge.reference import load_reference
from spec_export.judge.reference.eagle3 import Eagle3Reference
from spec_export.judge.reference.rope import Rope
from spec_export.judge.reference.serving_config import (
    ReferenceUnsupported,
    ServingError,
    parse_release,
    read_config,
)

DRAFT = make_draft(1, fc_norm=True)
RAW = serving_config(DRAFT)


def load(folder: Path, release: str = "0.5.23", **config: Any) -> Eagle3Reference:
    write_export(folder, DRAFT, **config)
    return load_reference(folder, embed=DRAFT.embed, release=release)


def test_releases_are_ordered() -> None:
    releases = ["0.4.9", "0.4.10", "0.5.4", "0.5.4.post1", "0.5.12", "1.0.0"]
    numbers = [parse_release(r) for r in releases]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)
    with pytest.raises(ValueError, match="not an SGLang release"):
        parse_release("latest")


def test_layer_names_before_0_5_12_are_dropped(tmp_path: Path) -> None:
    tensors = {
        name.replace("midlayer", "layers.0"): value
        for name, value in serving_tensors(DRAFT).items()
    }
    write_export(tmp_path, DRAFT, tensors=tensors)
    new = load_reference(tmp_path, embed=DRAFT.embed, release="0.5.12")
    assert new.report.missing == {} and new.report.dropped == []
    old = load_reference(tmp_path, embed=DRAFT.embed, release="0.5.11")
    assert "layers.0.mlp.down_proj.weight" in old.report.dropped
    assert old.report.missing["layers.0.hidden_norm.weight"] == "ones"
    assert old.report.missing["layers.0.self_attn.qkv_proj.weight[v]"] == "random"
    assert torch.equal(
        old.weights["layers.0.hidden_norm.weight"], torch.ones_like(DRAFT.embed[0])
    )


@pytest.mark.parametrize(
    ("release", "seen"),
    [
        ("0.5.11", {"fc_norm": False, "norm_output": False, "input_norm": False}),
        ("0.5.12", {"fc_norm": True, "norm_output": True, "input_norm": False}),
        ("0.5.17", {"fc_norm": True, "norm_output": True, "input_norm": True}),
    ],
)
def test_flags_by_release(release: str, seen: dict[str, bool]) -> None:
    raw = {**RAW, "fc_norm": True, "norm_output": True, "norm_before_fc": True}
    config = read_config(raw, release, window=7)
    assert {name: getattr(config, name) for name in seen} == seen
    assert config.window == (7 if release >= "0.5.12" else None)
    inside = {**raw, "norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}
    assert read_config(inside, release, window=None).input_norm == seen["input_norm"]


def test_features_that_an_old_release_ignores_are_dropped_tensors(
    tmp_path: Path,
) -> None:
    reference = load(tmp_path, release="0.5.11")
    assert reference.report.dropped == [f"fc_norm.{j}.weight" for j in range(3)]


@pytest.mark.parametrize(
    ("release", "config", "theta"),
    [
        ("0.5.23", {"rope_parameters": {**THETA, "rope_theta": 7.0}}, 7.0),
        ("0.5.23", {"rope_theta": 8.0}, 8.0),
        ("0.5.23", {}, 10000.0),
        # transformers 5 lets the older spelling win
        (
            "0.5.23",
            {"rope_parameters": THETA, "rope_scaling": {**THETA, "rope_theta": 9.0}},
            9.0,
        ),
        ("0.5.9", {"rope_parameters": {**THETA, "rope_theta": 7.0}}, 10000.0),
        ("0.5.9", {"rope_theta": 8.0}, 8.0),
        ("0.5.6.post1", {"rope_theta": 8.0, "rope_parameters": THETA}, 10000.0),
    ],
)
def test_rope_spellings(release: str, config: dict[str, Any], theta: float) -> None:
    raw = {k: v for k, v in RAW.items() if not k.startswith("rope")} | config
    assert read_config(raw, release, window=None).rope["rope_theta"] == theta


@pytest.mark.parametrize(
    ("release", "config", "dtype"),
    [
        ("0.5.23", {"dtype": "bfloat16", "torch_dtype": ...}, "bfloat16"),
        ("0.5.4", {"dtype": "bfloat16", "torch_dtype": ...}, "float16"),
        ("0.5.4", {"dtype": ..., "torch_dtype": "bfloat16"}, "bfloat16"),
        ("0.5.23", {"dtype": ..., "torch_dtype": ...}, "float16"),
    ],
)
def test_dtype_spellings(
    tmp_path: Path, release: str, config: dict[str, Any], dtype: str
) -> None:
    # A head as large as the vocabulary: before 0.5.4.post2 another size has to be a
    # multiple of 64.
    whole = {"vocab_size": 48, "fc_norm": False}
    reference = load(tmp_path, release=release, **whole, **config)
    assert reference.config.dtype == dtype
    rounded = DRAFT.weights["fc.weight"].to(getattr(torch, dtype)).float()
    assert torch.equal(reference.weights["fc.weight"], rounded)


def test_unknown_and_doubled_names(tmp_path: Path) -> None:
    tensors = serving_tensors(DRAFT)
    tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    tensors["layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    tensors["t2d"] = torch.ones(96, dtype=torch.bool)
    tensors["model.norm.weight"] = torch.ones(32)  # before norm.weight
    write_export(tmp_path, DRAFT, tensors=tensors)
    report = load_reference(tmp_path, embed=DRAFT.embed).report
    assert report.dropped == [
        "layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.q_proj.bias",
    ]
    assert report.doubled == ["norm.weight"]


def test_missing_matrices_are_the_same_every_time(tmp_path: Path) -> None:
    tensors = serving_tensors(DRAFT)
    del tensors["fc.weight"]
    write_export(tmp_path, DRAFT, tensors=tensors)
    one, two = (load_reference(tmp_path, embed=DRAFT.embed) for _ in range(2))
    assert one.report.missing == {"fc.weight": "random"}
    assert torch.equal(one.weights["fc.weight"], two.weights["fc.weight"])


def test_every_top_level_file_is_read_unless_an_index_names_them(
    tmp_path: Path,
) -> None:
    write_export(tmp_path, DRAFT)
    stray = {"norm.weight": torch.full((32,), 3.0)}
    save_file(stray, tmp_path / "zz_stray.safetensors")
    assert load_reference(tmp_path, embed=DRAFT.embed).report.doubled == ["norm.weight"]
    index = {"weight_map": dict.fromkeys(DRAFT.weights, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_reference(tmp_path, embed=DRAFT.embed).report.doubled == []


def test_an_own_width_keeps_the_drafts_embedding(tmp_path: Path) -> None:
    """With target_hidden_size != hidden_size SGLang shares no embedding."""
    draft = make_draft(1, aux_ids=(2, 4))
    tensors = serving_tensors(draft) | {"embed_tokens.weight": draft.embed}
    folder = write_export(
        tmp_path, draft, tensors=tensors, target_hidden_size=64, num_aux_hidden_states=1
    )
    reference = load_reference(folder, embed=None)
    assert torch.equal(reference.weights["embed_tokens.weight"], draft.embed)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"num_hidden_layers": 2}, ServingError, "supports one before 0.5.12"),
        ({"draft_vocab_size": None}, None, ""),
        ({"eagle_config": [1]}, ServingError, "eagle_config"),
        ({"model_type": "mistral"}, ReferenceUnsupported, "mistral"),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}},
            ReferenceUnsupported,
            "mrope_section",
        ),
    ],
)
def test_configs_that_do_not_load(
    config: dict[str, Any], error: type[Exception] | None, words: str
) -> None:
    if error is None:
        assert read_config({**RAW, **config}, "0.5.11", window=None).head_from_target
        with pytest.raises(ServingError, match="draft_vocab_size is null"):
            read_config({**RAW, **config}, "0.5.1", window=None)
        return
    with pytest.raises(error, match=words):
        read_config({**RAW, **config}, "0.5.11", window=None)


def test_the_oldest_release_covered() -> None:
    with pytest.raises(ReferenceUnsupported, match=r"starts at 0\.4\.5"):
        read_config(RAW, "0.4.4", window=None)


def test_yarn_reads_attn_factor_and_not_attention_factor() -> None:
    def scale(**more: float) -> float:
        rope = {**THETA, "rope_type": "yarn", "factor": 4.0, **more}
        raw = {**RAW, "rope_parameters": rope, "rope_scaling": rope}
        return Rope(read_config(raw, "0.5.23", window=None)).scale

    plain = 0.1 * math.log(4.0) + 1
    assert scale() == pytest.approx(plain)
    assert scale(attention_factor=2.0) == pytest.approx(plain)
    assert scale(attn_factor=2.0) == pytest.approx(2 * plain)


def test_dynamic_rope_is_a_static_base() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    raw = {**RAW, "rope_parameters": rope, "rope_scaling": rope}
    table = Rope(read_config(raw, "0.5.23", window=None))
    base = 1000.0 * 3 ** (8 / 6)
    assert table.frequencies[1].item() == pytest.approx(base ** (-2 / 8))


def test_padded_logits_of_old_releases(tmp_path: Path) -> None:
    """They were cropped to the vocabulary of the target, not of the draft."""
    with pytest.raises(ServingError, match="its padding shows"):
        load(tmp_path, release="0.5.4", fc_norm=False)
    load(tmp_path, release="0.5.4.post2", fc_norm=False)
