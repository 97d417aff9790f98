"""Case 25: an MTP head is merged back into the sharded target that it came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_export import merge as merge_module
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.comparison import layout_of_merged
from spec_export.export import ExportOptions
from spec_export.findings import SpecExportError
from spec_export.judge.compare import largest
from spec_export.merge import SIDE_FILE, MergeResult, merge_into
from spec_export.serving.verify import verify
from tests.helpers.cli import spec_export
from tests.helpers.mtp import EXPERTS, HIDDEN, make_mtp, make_target

ALLOWED = ExportOptions(allow=("mtp-first-step",))
NAMES = {
    "input_proj": "mtp.fc",
    "hidden_layernorm": "mtp.pre_fc_norm_hidden",
    "token_layernorm": "mtp.pre_fc_norm_embedding",
    "final_layernorm": "mtp.norm",
}
TRAINED = [
    "mtp.fc.weight",
    "mtp.layers.0.mlp.experts.1.gate_proj.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
]
Tensors = dict[str, torch.Tensor]


def native(state: Tensors, fused: bool) -> Tensors:
    """The head under its target's names, written without the exporter."""
    out: Tensors = {}
    for name, value in state.items():
        plain = name.removeprefix("mtp_layers.0.")
        stem, _, leaf = plain.rpartition(".")
        if leaf == "gate_up_proj" and not fused:
            for e in range(EXPERTS):
                gate, up = value[e].chunk(2)
                out[f"mtp.layers.0.{stem}.{e}.gate_proj.weight"] = gate.clone()
                out[f"mtp.layers.0.{stem}.{e}.up_proj.weight"] = up.clone()
        elif stem == "mlp.experts" and not fused:
            for e in range(EXPERTS):
                out[f"mtp.layers.0.{stem}.{e}.down_proj.weight"] = value[e].clone()
        else:
            out[f"{NAMES.get(stem, f'mtp.layers.0.{stem}')}.{leaf}"] = value.clone()
    return out


@dataclass
class Desk:
    target: Path
    checkpoint: Path
    root: Path

    def merge(self, **options: Any) -> MergeResult:
        return merge_into(
            self.checkpoint, self.target, self.root / "merged", ALLOWED, **options
        )

    def change(self, change: Callable[[Tensors], None]) -> None:
        """Change the trained checkpoint."""
        file = self.checkpoint / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})


def _shard(target: Path, head: Tensors) -> None:
    """Three shards: the target's own, and the head spread over the other two."""
    own = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    own["model.layers.0.mlp.up_proj.weight"] = torch.randn(48, HIDDEN).bfloat16()
    names = sorted(head)
    shards = [own, {n: head[n] for n in names[::2]}, {n: head[n] for n in names[1::2]}]
    shards[2]["model.layers.3.mlp.up_proj.weight"] = torch.randn(4, HIDDEN).half()
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file(tensors, target / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "tokenizer.json").write_text("{}")


def _train(tensors: Tensors) -> None:
    """Three of the target's tensors move, one of them inside the fused experts."""
    layer = "mtp_layers.0"
    tensors[f"{layer}.input_proj.weight"] *= 1.5
    tensors[f"{layer}.self_attn.q_proj.weight"] *= 0.5
    both = tensors[f"{layer}.mlp.experts.gate_up_proj"]
    both[1, : both.shape[1] // 2] += 0.25


@pytest.fixture(params=["one by one", "fused"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    fused = request.param == "fused"
    kind = "qwen3_5_moe_text" if fused else "qwen3_next"
    target = make_target(tmp_path / "target", kind)
    checkpoint = make_mtp(tmp_path / "checkpoint", target, kind)
    _shard(target, native(load_file(checkpoint / "model.safetensors"), fused))
    made = Desk(target, checkpoint, tmp_path)
    made.change(_train)
    return made


def _all(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_the_copy_is_the_target_with_the_trained_head(desk: Desk) -> None:
    result = desk.merge()
    merged, before = desk.root / "merged", _all(desk.target)
    after = _all(merged)
    assert list(result.shards.values()) == ["linked", "rewritten", "rewritten"]
    first = "model-00001-of-00003.safetensors"
    assert (merged / first).read_bytes() == (desk.target / first).read_bytes()
    for name in ("model.safetensors.index.json", "config.json", "tokenizer.json"):
        assert (merged / name).read_bytes() == (desk.target / name).read_bytes()
    assert set(after) == set(before)
    moved = [n for n in after if not torch.equal(after[n], before[n])]
    assert sorted(moved) == result.trained
    assert all(after[n].dtype == before[n].dtype for n in after)
    state = load_file(desk.checkpoint / "model.safetensors")
    fused = "mtp.layers.0.mlp.experts.gate_up_proj" in after
    wanted = native(state, fused)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    if not fused:
        assert result.trained == TRAINED
    assert result.leg.passed and largest(result.leg.metrics) <= 1e-5
    record = json.loads((merged / SIDE_FILE).read_text())
    assert record["counts"] == {"trained": 3, "unchanged": len(wanted) - 3}
    assert str(desk.root) not in (merged / SIDE_FILE).read_text()


def test_a_merged_copy_is_checked_by_name(desk: Desk) -> None:
    desk.merge(compare=False)
    merged, target = desk.root / "merged", open_target(desk.target)
    assert {f.code for f in verify(merged, target).findings} == {"manifest-missing"}
    shard = merged / "model-00002-of-00003.safetensors"
    held = load_file(shard)
    name = min(n for n in held if "experts" not in n)
    held[f"{name}_"] = held.pop(name)
    shard.unlink()
    save_file(held, shard, {"format": "pt"})
    found = {f.subject for f in verify(merged, target).findings}
    assert {name, f"{name}_"} <= found


def test_the_target_is_left_as_it_was(desk: Desk) -> None:
    before = {p.name: p.read_bytes() for p in desk.target.iterdir()}
    desk.merge(compare=False)
    assert {p.name: p.read_bytes() for p in desk.target.iterdir()} == before


def test_without_links_the_shard_is_copied(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(merge_module.os, "link", refuse)
    result = desk.merge(compare=False)
    first = "model-00001-of-00003.safetensors"
    assert result.shards[first] == "copied"
    copied = desk.root / "merged" / first
    assert copied.read_bytes() == (desk.target / first).read_bytes()


def _refused(desk: Desk, code: str, exit_code: int = 1, **options: Any) -> str:
    with pytest.raises(SpecExportError) as caught:
        desk.merge(**options)
    assert not (desk.root / "merged").exists()
    assert not list(desk.root.glob(".staging-*"))
    assert caught.value.exit_code == exit_code
    found = [f for f in caught.value.findings if f.code == code]
    assert found, caught.value.findings
    return f"{found[0].subject}: {found[0].message}"


def test_nothing_trained_is_an_error(desk: Desk) -> None:
    desk.change(lambda tensors: tensors.update(_undone(desk)))
    assert "none of" in _refused(desk, "nothing-trained")


def _undone(desk: Desk) -> Tensors:
    """The trained tensors as the target has them."""
    held, layer = _all(desk.target), "mtp_layers.0"
    both = held.get("mtp.layers.0.mlp.experts.gate_up_proj")
    if both is None:
        name = "mtp.layers.0.mlp.experts.{}.{}_proj.weight"
        pairs = [
            torch.cat([held[name.format(e, "gate")], held[name.format(e, "up")]])
            for e in range(EXPERTS)
        ]
        both = torch.stack(pairs)
    return {
        f"{layer}.input_proj.weight": held["mtp.fc.weight"],
        f"{layer}.self_attn.q_proj.weight": held[
            "mtp.layers.0.self_attn.q_proj.weight"
        ],
        f"{layer}.mlp.experts.gate_up_proj": both,
    }


def test_an_expert_is_missing(desk: Desk) -> None:
    def fewer(tensors: Tensors) -> None:
        for part in ("gate_up_proj", "down_proj"):
            name = f"mtp_layers.0.mlp.experts.{part}"
            tensors[name] = tensors[name][:2].clone()

    desk.change(fewer)
    assert "[2, 32, 16]" in _refused(desk, "shape-mismatch")


def test_a_tensor_of_the_target_is_missing(desk: Desk) -> None:
    desk.change(lambda tensors: tensors.__delitem__("mtp_layers.0.mlp.gate.weight"))
    assert "mlp.gate.weight" in _refused(desk, "tensor-missing")


def test_a_value_that_is_not_a_number(desk: Desk) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["mtp_layers.0.input_proj.weight"][0, 3] = float("nan")

    desk.change(spoil)
    assert "input_proj" in _refused(desk, "non-finite", compare=False)


def test_a_target_without_an_mtp_head(desk: Desk, tmp_path: Path) -> None:
    kind = "qwen3_next"
    plain = make_target(tmp_path / "plain", kind)
    if (desk.target / "config.json").read_text().find("Qwen3Next") < 0:
        shutil.copy(desk.target / "config.json", plain / "config.json")
    desk.target = plain
    assert "mtp" in _refused(desk, "target-unsupported")


def test_a_hub_id_is_not_enough(desk: Desk) -> None:
    desk.target = Path("Qwen/Qwen3-Next-80B-A3B-Instruct")
    _refused(desk, "path-missing", exit_code=2)


def test_swapped_halves_fail_in_the_comparison(desk: Desk) -> None:
    desk.merge(compare=False)
    merged = desk.root / "merged"
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    file = merged / index["weight_map"]["mtp.fc.weight"]
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(HIDDEN, 1)
    save_file(tensors, file, {"format": "pt"})
    leg = layout_of_merged(
        CheckpointSource.open(desk.checkpoint),
        open_target(desk.target),
        merged,
        "cpu",
        None,
    )
    assert leg.verdict == "fail" and "input_proj" in leg.diagnosis[0]


def test_the_command(desk: Desk) -> None:
    arguments = (
        *("finalize", desk.checkpoint, "--merge-into", desk.target),
        *("--output", desk.root / "merged"),
    )
    ran = spec_export(*arguments)
    assert ran.code == 1 and ran.codes() == ["mtp-first-step"]
    ran = spec_export(*arguments, "--allow", "mtp-first-step")
    assert (ran.code, len(ran.data["trained"]), ran.data["verdict"]) == (0, 3, "pass")
