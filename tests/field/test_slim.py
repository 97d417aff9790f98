"""Slim checkpoints: what speculators leaves to the target is taken from there by name.

Since 0.8 a checkpoint lacks what its target owns. Whatever else is missing is missing:
nothing is filled in, least of all with what a class starts from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.field.desk import Desk, same_bits
from tests.helpers import blocks, mtp
from tests.helpers.field import make_draft, make_target

NO = "--no-compare"
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
# A family -> a tensor that training changes.
FAMILIES = {
    "eagle3": "fc.weight",
    "dflash": "hidden_norm.weight",
    "dflash reduced": "layers.1.mlp.down_proj.weight",
    "dflash2": "candidate_selector.successor_codebook",
    "dspark": "markov_head.markov_w2.weight",
    "dspark reduced": "markov_head.markov_w1.weight",
    "qwen3_next": "mtp_layers.0.mlp.experts.down_proj",
    "qwen3_5_text": "mtp_layers.0.input_proj.weight",
    "qwen3_5_moe_text": "mtp_layers.0.mlp.shared_expert_gate.weight",
}


def make(desk: Desk, family: str) -> tuple[Path, Path, list[str]]:
    """Target, checkpoint without what the target owns, and more arguments."""
    target, source = desk.new("target"), desk.new("slim")
    kind, _, reduced = family.partition(" ")
    allow = []
    if kind == "eagle3":
        make_draft(source, make_target(target))
    elif kind in blocks.KINDS:
        blocks.make_target(target)
        blocks.make_block_draft(source, target, kind, reduced=bool(reduced))
    else:
        mtp.make_mtp(source, mtp.make_target(target, kind), kind)
        allow = ["--allow", "mtp-first-step"]
    edit(source, drop=(EMBED, HEAD))
    return target, source, allow


def edit(folder: Path, drop: tuple[str, ...]) -> None:
    path = folder / "model.safetensors"
    held = {k: v for k, v in load_file(path).items() if k not in drop}
    save_file(held, path, {"format": "pt"})


def test_what_is_missing_comes_from_the_target(desk: Desk) -> None:
    """EAGLE-3: the head is written; its rows are those of the map."""
    target, source, _ = make(desk, "eagle3")
    answer = desk.ok("slim eagle3", desk.finalize(source))
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    d2t = load_file(source / "model.safetensors")["d2t"]
    assert same_bits(answer.tensors[HEAD], head[torch.arange(len(d2t)) + d2t])
    assert EMBED not in answer.tensors


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "eagle3"])
def test_what_sglang_shares_is_not_written(desk: Desk, family: str) -> None:
    target, source, allow = make(desk, family)
    answer = desk.finalize(source, "--target", target, *allow)
    assert answer.code == 0, answer.data["findings"]
    assert answer.data["verdict"] == "pass"  # judged with the target's own
    assert not any("embed_tokens" in n or "lm_head" in n for n in answer.tensors)
    provided = {p["name"] for p in answer.manifest["provided_by_target"]}
    assert provided == {EMBED, HEAD}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_target_s_weights_nothing_is_made_up(
    desk: Desk, family: str
) -> None:
    """EAGLE-3 needs the head; the others are written, and not called compared."""
    target, source, allow = make(desk, family)
    (target / "model.safetensors").unlink()
    answer = desk.finalize(source, "--target", target, *allow)
    if family == "eagle3":
        desk.fails("slim eagle3, no target", answer, HEAD, "weights are not at hand")
        return
    assert answer.code == 0, answer.data["findings"]
    assert answer.data["verdict"] == "not run"
    missing = [f["code"] for f in answer.of("warning")]
    assert "target-weights-missing" in missing
    assert not any("embed_tokens" in n or "lm_head" in n for n in answer.tensors)


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_a_trained_tensor_is_missed_by_name(desk: Desk, family: str, name: str) -> None:
    target, source, allow = make(desk, family)
    edit(source, drop=(name,))
    answer = desk.finalize(source, NO, "--target", target, *allow)
    desk.fails(
        f"slim {family} without {name}", answer, name, "is not in the checkpoint"
    )
