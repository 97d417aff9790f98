"""``verify`` of folders with MTP weights: names and shapes as SGLang's classes load.

The folder is a draft's own, made here or by hand, or a whole target with an MTP head
in it; its config.json is the target's and names the target's class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.export import ExportOptions, export_source
from spec_export.findings import SpecExportError
from spec_export.judge.reference.mtp import read_mtp_config
from spec_export.judge.reference.serving_config import ServingError
from spec_export.layout.catalog import template_of_class
from spec_export.layout.loader import check_folder
from spec_export.layout.tensors import TensorInfo
from spec_export.serving.verify import VerifyResult, verify
from tests.helpers.mtp import EXPERTS, HIDDEN, SIZES, TARGETS, make_mtp, make_target

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Change = Callable[[Tensors, Config], None]
EXPERT = "mtp.layers.0.mlp.experts"
MOE = [kind for kind in TARGETS if kind != "qwen3_5_text"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder with ``target`` and ``export`` of a kind of layers, made once."""
    folders: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            root = folders[kind] = tmp_path_factory.mktemp(kind)
            target = make_target(root / "target", kind)
            checkpoint = make_mtp(root / "checkpoint", target, kind)
            options = ExportOptions(allow=("mtp-first-step",))
            source, opened = CheckpointSource.open(checkpoint), open_target(target)
            export_source(source, opened, options, root / "export")
        return folders[kind]

    return get


Made = Callable[[str], Path]


def by_hand(root: Path, out: Path, *changes: Change) -> Path:
    """The export without manifest, changed."""
    tensors = load_file(root / "export" / "model.safetensors")
    config = json.loads((root / "export" / "config.json").read_text())
    for change in changes:
        change(tensors, config)
    out.mkdir()
    held = {name: value.contiguous().clone() for name, value in tensors.items()}
    save_file(held, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def errors(result: VerifyResult) -> dict[str, tuple[str, str]]:
    """Subject -> code and message of each error."""
    found = [f for f in result.findings if f.severity == "error"]
    assert len({f.subject for f in found}) == len(found)
    return {f.subject: (f.code, f.message) for f in found}


def fuse(tensors: Tensors, config: Config) -> None:
    """All experts in one tensor, as transformers has them."""
    for parts, name in ((("gate", "up"), "gate_up_proj"), (("down",), "down_proj")):
        one_by_one = [
            torch.cat([tensors.pop(f"{EXPERT}.{e}.{p}_proj.weight") for p in parts])
            for e in range(EXPERTS)
        ]
        tensors[f"{EXPERT}.{name}"] = torch.stack(one_by_one)


def _beside_a_target(tensors: Tensors, config: Config) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
    tensors["model.layers.0.odd.weight"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(4, 4)


@pytest.mark.parametrize("kind", TARGETS)
def test_an_export_is_checked_by_name(made: Made, kind: str, tmp_path: Path) -> None:
    root = made(kind)
    target = open_target(root / "target")
    result = verify(root / "export", target)
    assert errors(result) == {}
    assert errors(verify(by_hand(root, tmp_path / "draft"), target)) == {}
    # A whole target: what is not called mtp is not read, whatever it is.
    whole = by_hand(root, tmp_path / "whole", _beside_a_target)
    assert errors(verify(whole, target)) == {}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_name_that_nothing_takes(made: Made, kind: str, tmp_path: Path) -> None:
    def rename(tensors: Tensors, config: Config) -> None:
        tensors["mtp.final_norm.weight"] = tensors.pop("mtp.norm.weight")

    found = errors(verify(by_hand(made(kind), tmp_path / "draft", rename)))
    assert set(found) == {"mtp.final_norm.weight", "mtp.norm.weight"}
    code, message = found["mtp.final_norm.weight"]
    assert code == "name-dropped"
    # models/qwen3_next.py looks a name up without asking whether it is there.
    assert ("KeyError" in message) is (kind == "qwen3_next")
    assert ("silently" in message) is (kind != "qwen3_next")
    assert found["mtp.norm.weight"][0] == "tensor-missing"


@pytest.mark.parametrize("kind", TARGETS)
def test_a_tensor_that_is_missing(made: Made, kind: str, tmp_path: Path) -> None:
    gone = "mtp.layers.0.self_attn.k_proj.weight"

    def drop(tensors: Tensors, config: Config) -> None:
        del tensors[gone]

    out = by_hand(made(kind), tmp_path / "draft", drop)
    assert {s: c for s, (c, _) in errors(verify(out)).items()} == {
        gone: "tensor-missing"
    }


@pytest.mark.parametrize("kind", TARGETS)
def test_a_shape_of_another_target(made: Made, kind: str, tmp_path: Path) -> None:
    name = "mtp.fc.weight"

    def cut(tensors: Tensors, config: Config) -> None:
        tensors[name] = tensors[name][:, :HIDDEN]

    code, message = errors(verify(by_hand(made(kind), tmp_path / "draft", cut)))[name]
    assert code == "shape-mismatch"
    assert f"[{HIDDEN}, {HIDDEN}]" in message and f"[{HIDDEN}, {2 * HIDDEN}]" in message


@pytest.mark.parametrize("kind", MOE)
def test_experts_in_one_tensor(made: Made, kind: str, tmp_path: Path) -> None:
    found = errors(verify(by_hand(made(kind), tmp_path / "draft", fuse)))
    if kind != "qwen3_next":
        assert found == {}
        return
    assert "KeyError" in found[f"{EXPERT}.gate_up_proj"][1]
    assert found[f"{EXPERT}.2.down_proj.weight"][0] == "tensor-missing"


def test_experts_in_one_tensor_the_wrong_way(made: Made, tmp_path: Path) -> None:
    def turned(tensors: Tensors, config: Config) -> None:
        fuse(tensors, config)
        down = tensors[f"{EXPERT}.down_proj"]
        tensors[f"{EXPERT}.down_proj"] = down.transpose(1, 2)
        both = tensors[f"{EXPERT}.gate_up_proj"]
        tensors[f"{EXPERT}.gate_up_proj"] = both[1:]

    def twice(tensors: Tensors, config: Config) -> None:
        one = tensors[f"{EXPERT}.1.down_proj.weight"]
        fuse(tensors, config)
        tensors[f"{EXPERT}.1.down_proj.weight"] = one

    root = made("qwen3_5_moe_text")
    found = errors(verify(by_hand(root, tmp_path / "turned", turned)))
    assert {s: c for s, (c, _) in found.items()} == {
        f"{EXPERT}.gate_up_proj": "shape-mismatch",
        f"{EXPERT}.down_proj": "shape-mismatch",
    }
    found = errors(verify(by_hand(root, tmp_path / "twice", twice)))
    assert [c for c, _ in found.values()] == ["file-contradiction"]


@pytest.mark.parametrize("kind", TARGETS)
def test_no_mtp_at_all(made: Made, kind: str) -> None:
    found = errors(verify(made(kind) / "target"))
    assert found["mtp.*"][0] == "tensor-missing"
    assert "is this a draft?" in str(verify(made(kind) / "target").findings)


def test_sizes_inside_a_text_configuration(made: Made, tmp_path: Path) -> None:
    root = made("qwen3_5_moe_text")

    def other(tensors: Tensors, config: Config) -> None:
        config["text_config"]["num_attention_heads"] = 8
        config["text_config"]["vocab_size"] = 65

    found = errors(
        verify(by_hand(root, tmp_path / "draft", other), open_target(root / "target"))
    )
    attention = "mtp.layers.0.self_attn"
    assert set(found) == {
        f"{attention}.q_proj.weight",
        f"{attention}.o_proj.weight",
        "vocab_size",
    }

    def gone(tensors: Tensors, config: Config) -> None:
        del config["text_config"]["hidden_size"]

    found = errors(verify(by_hand(root, tmp_path / "gone", gone)))
    assert found["hidden_size"][0] == "config-invalid"


def test_many_missing_experts_are_told_once() -> None:
    template = template_of_class("Qwen3NextForCausalLM")
    assert template is not None
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    sizes |= {"head_dim": 4, "num_experts": 512, "moe_intermediate_size": 4}
    config = {**sizes, "shared_expert_intermediate_size": 4}
    held = {"mtp.norm.weight": TensorInfo("mtp.norm.weight", "BF16", (8,))}
    found = check_folder(template, config, held, Version("0.5.23"))
    experts = [f for f in found if "experts." in f.subject]
    assert len(experts) == 3
    assert all("512 names" in f.message for f in experts)


def test_a_class_that_an_older_release_does_not_know(
    made: Made, tmp_path: Path
) -> None:
    draft = by_hand(made("qwen3_5_text"), tmp_path / "draft")
    found = [
        f for f in verify(draft, sglang="0.5.16").findings if f.severity == "error"
    ]
    assert [f.code for f in found] == ["release-too-old"]
    assert "0.5.17" in found[0].message
    assert errors(verify(draft, sglang="0.5.17")) == {}


def test_which_class_stands_for_which() -> None:
    for name, wanted in (
        ("Qwen3NextForCausalLM", "mtp-qwen3_next"),
        ("Qwen3NextForCausalLMMTP", "mtp-qwen3_next"),
        ("Qwen3_5ForConditionalGeneration", "mtp-qwen3_5"),
        ("Qwen3_5MoeForCausalLM", "mtp-qwen3_5"),
    ):
        found = template_of_class(name)
        assert found is not None and found.template == wanted
    assert template_of_class("Qwen3ForCausalLM") is None


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
DEFAULT = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (YARN, "the type yarn, on which"),
        (DEFAULT, '"rope_theta": 10000.0, "partial_rotary_factor": 0.25 instead of'),
        (DEFAULT | {"rope_type": "linear", "factor": 2.0}, '"rope_scaling": null'),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_a_rope_that_the_class_of_the_target_does_not_read(
    tmp_path: Path, rope: Config, said: str
) -> None:
    """transformers 5 saves Qwen3-Next in a spelling that SGLang's class passes over."""
    with patch.dict(SIZES, {"rope_parameters": rope}):
        target = make_target(tmp_path / "target", "qwen3_next")
        checkpoint = make_mtp(tmp_path / "checkpoint", target, "qwen3_next")
    source, export = CheckpointSource.open(checkpoint), tmp_path / "export"
    options = ExportOptions(allow=("mtp-first-step",))
    with pytest.raises(SpecExportError) as caught:
        export_source(source, open_target(target), options, export)
    (found,) = [f for f in caught.value.findings if f.severity == "error"]
    assert found.code == "target-rope-unread" and said in found.message
    assert found.subject == "target config.json rope_parameters"

    # What the hint says is the remedy.
    config = json.loads((target / "config.json").read_text())
    told = re.search(r" write (.+) (instead of|beside) it;", found.hint or "")
    assert told is not None
    older = json.loads(f"{{{told[1]}}}")
    if told[2] == "instead of":
        del config["rope_parameters"]
    (target / "config.json").write_text(json.dumps(config | older))
    export_source(source, open_target(target), options, export)
    written = json.loads((export / "config.json").read_text())
    assert {key: written[key] for key in older} == older
    assert ("rope_parameters" in written) is (rope["rope_type"] == "default")
    assert not errors(verify(export, open_target(target)))


def test_a_rope_that_a_draft_s_class_fails_on(made: Made, tmp_path: Path) -> None:
    def newer(tensors: Tensors, config: Config) -> None:
        config["rope_parameters"] = YARN

    folder = by_hand(made("qwen3_next"), tmp_path / "hand", newer)
    code, message = errors(verify(folder))["rope_parameters.rope_type"]
    assert code == "config-invalid" and "yarn" in message
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ServingError, match="yarn"):
        read_mtp_config(config, "0.5.11")
    assert read_mtp_config(config, "0.5.10.post1").rope["rope_type"] == "default"
    assert not errors(verify(by_hand(made("qwen3_next"), tmp_path / "plain")))
