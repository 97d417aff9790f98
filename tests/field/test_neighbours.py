"""Faults beside the reported ones: other tensors, flags, shards, targets, files.

Sub-cases are called by the number of the case whose kind of fault they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.field.desk import (
    NEW,
    OLD,
    Desk,
    copy_export,
    rename_tensors,
    same_bits,
)
from tests.field.test_cases import (
    EMBED,
    HEAD,
    IDS,
    NEVER,
    NO,
    WRITTEN_IDS,
    norm,
    wide_fc,
)
from tests.field.test_cases_files import sharded, shards
from tests.helpers.field import (
    DRAFT,
    INNER,
    VOCAB,
    H,
    draft_ids,
    draft_tensors,
    make_target,
)

LAYER = "transformer_layer_config"
INDEX = "model.safetensors.index.json"


def second_layer(seed: int = 5) -> dict[str, torch.Tensor]:
    """The tensors of a second decoder layer."""
    torch.manual_seed(seed)
    shapes = {
        **{f"self_attn.{p}_proj.weight": (H, H) for p in "qkvo"},
        "mlp.gate_proj.weight": (INNER, H),
        "mlp.up_proj.weight": (INNER, H),
        "mlp.down_proj.weight": (H, INNER),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    return {
        f"layers.1.{name}": (torch.randn(shape) * 0.5 + ("norm" in name)).bfloat16()
        for name, shape in shapes.items()
    }


TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


# ------------------------------------------------ 2: what the server makes of names
def hand_made(desk: Desk, **config: Any) -> Path:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    return copy_export(export, desk.new("hand"), **config)


@pytest.mark.parametrize("release", [OLD, NEW])
def test_2_the_prefix_of_the_inner_model(desk: Desk, release: str) -> None:
    """``model.`` is looked up for every name but the head's."""
    folder = hand_made(desk)
    rename_tensors(folder, {"midlayer.": "model.midlayer.", "fc.": "model.fc."})
    answer = desk.verify(folder, "--sglang", release)
    if release == OLD:
        desk.warned("2 model. prefix, old", answer, WRITTEN_IDS, "0.5.11")
    else:
        desk.ok("2 model. prefix, new", answer)
    rename_tensors(folder, {"lm_head.": "model.lm_head."})
    answer = desk.verify(folder, "--sglang", release)
    desk.fails("2 model.lm_head", answer, "model.lm_head.weight", "drops it")
    desk.fails("2 model.lm_head, unset", answer, HEAD, "uninitialised")


def test_2_a_prefix_of_the_wrapper(desk: Desk) -> None:
    folder = rename_tensors(hand_made(desk), {"midlayer.": "draft_model.midlayer."})
    name = "draft_model.midlayer.mlp.up_proj.weight"
    desk.fails("2 draft_model. prefix", desk.verify(folder), name, "drops it")


def test_2_fused_projections_load_as_they_are(desk: Desk) -> None:
    folder = hand_made(desk)
    path = folder / "model.safetensors"
    held = load_file(path)
    at = "midlayer.self_attn."
    held[f"{at}qkv_proj.weight"] = torch.cat(
        [held.pop(f"{at}{p}_proj.weight") for p in "qkv"]
    )
    save_file(held, path, {"format": "pt"})
    desk.ok("2 fused qkv", desk.verify(folder))
    held[f"{at}q_proj.weight"] = torch.ones(H, 2 * H)
    save_file(held, path, {"format": "pt"})
    answer = desk.verify(folder)
    desk.fails("2 fused qkv and q", answer, f"{at}qkv_proj.weight", "last one wins")


def test_2_several_layers_have_other_norm_names(desk: Desk) -> None:
    source = desk.draft(add=second_layer(), layer=TWO_LAYERS)
    answer = desk.ok("2 two layers, new", desk.finalize(source, "--sglang", NEW))
    assert "layers.1.hidden_norm.weight" in answer.tensors
    assert "layers.1.input_layernorm.weight" not in answer.tensors
    old = desk.finalize(source, NO, "--sglang", "0.5.11")
    desk.fails("2 two layers, 0.5.11", old, f"{LAYER}.num_hidden_layers", "0.5.12")
    assert answer.output is not None
    folder = copy_export(answer.output, desk.new("hand"))
    was, wrong = "layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight"
    rename_tensors(folder, {was: wrong})
    found = desk.verify(folder)
    desk.fails("2 two layers, verbatim", found, wrong, "hidden_norm")
    desk.fails("2 two layers, unset", found, was, "at ones")


def test_2_names_that_drop_in_the_last_of_three_shards(desk: Desk) -> None:
    folder = rename_tensors(hand_made(desk), {"midlayer.mlp.": "layers.0.mlp."})
    held = load_file(folder / "model.safetensors")
    parts = [{n: held[n] for n in sorted(held)[i::3]} for i in range(3)]
    shards(folder, parts)
    answer = desk.verify(folder, "--sglang", OLD)
    desk.fails("2 mixed names, shards", answer, "layers.0.mlp.up_proj.weight", OLD)


# ----------------------------------------------------------- 4: heads and targets
def test_4_a_slim_checkpoint_with_a_map_takes_the_mapped_rows(desk: Desk) -> None:
    answer = desk.ok("4 slim, map", desk.finalize(desk.draft(drop=(HEAD, EMBED))))
    theirs = load_file(desk.target / "model.safetensors")["lm_head.weight"]
    assert same_bits(answer.tensors[HEAD], theirs[draft_ids()])


def test_4_a_slim_checkpoint_of_another_dtype_is_cast(desk: Desk) -> None:
    tensors = {
        k: v.float() if v.is_floating_point() else v
        for k, v in draft_tensors(desk.target).items()
        if k not in (HEAD, EMBED)
    }
    answer = desk.ok("4 slim, float32", desk.finalize(desk.draft(tensors)))
    assert answer.tensors[HEAD].dtype == torch.float32


def test_4_a_target_without_weights_is_enough_for_a_whole_draft(desk: Desk) -> None:
    source = desk.draft()
    bare = make_target(desk.root / "bare", weights=False)
    answer = desk.finalize(source, NO, "--target", bare)
    desk.warned("4 target without weights", answer, "bare", "not at hand")
    assert answer.manifest["target_model"]["digests"]["head"] is None


def test_4_nan_in_the_head_that_is_borrowed(desk: Desk) -> None:
    target = make_target(desk.root / "T1")
    held = load_file(target / "model.safetensors")
    held["lm_head.weight"][13, 1] = math.nan
    save_file(held, target / "model.safetensors", {"format": "pt"})
    answer = desk.finalize(desk.draft(target=target, drop=(HEAD,)), NO)
    desk.fails("4 NaN in borrowed head", answer, HEAD, "row 7")


def test_4_hand_made_folders_without_a_head(desk: Desk) -> None:
    folder = hand_made(desk, draft_vocab_size=VOCAB)
    held = load_file(folder / "model.safetensors")
    held = {k: v for k, v in held.items() if k not in (HEAD, "d2t")}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    desk.fails("4 size 32, no head", desk.verify(folder), HEAD, "uninitialised")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"draft_vocab_size": None}))
    desk.ok("4 size null, no head", desk.verify(folder))
    old = desk.verify(folder, "--sglang", "0.4.9.post6")
    desk.fails("4 size null, 0.4.9.post6", old, "draft_vocab_size", "0.5.2")
    del config["draft_vocab_size"]
    path.write_text(json.dumps(config))
    desk.fails("4 size absent", desk.verify(folder), "draft_vocab_size", "missing")


def test_4_another_target_of_the_same_shape(desk: Desk) -> None:
    source, other = desk.draft(), make_target(desk.root / "T1")
    held = load_file(other / "model.safetensors")
    held = {k: v * 2 for k, v in held.items()}
    save_file(held, other / "model.safetensors", {"format": "pt"})
    answer = desk.finalize(source, NO, "--target", other)
    desk.fails("4 another target", answer, EMBED, "another target")
    allowed = ("--allow", "target-differs")
    answer = desk.finalize(source, NO, "--target", other, *allowed)
    desk.warned("4 another target, allowed", answer, EMBED, "another target")
    export = desk.finalize(source, NO).output
    assert export is not None
    answer = desk.verify(export, "--target", other)
    desk.fails("4 another target, verify", answer, "target embedding", "SHA-256")


@pytest.mark.parametrize(
    "changes, subject, says",
    [
        ({"hidden_size": 16}, f"{LAYER}.hidden_size", ("8", "16")),
        ({"vocab_size": 64}, f"{LAYER}.vocab_size", ("32", "64")),
        ({"num_hidden_layers": 3}, IDS, ("id 4", "3 layers")),
        ({"architectures": ["BertModel"]}, "architectures", ("BertModel",)),
    ],
    ids=["width", "vocabulary", "depth", "family"],
)
def test_4_a_target_of_another_shape(
    desk: Desk, changes: dict[str, Any], subject: str, says: tuple[str, ...]
) -> None:
    other = make_target(desk.root / "T1", weights=False, **changes)
    answer = desk.finalize(desk.draft(), NO, "--target", other)
    desk.fails(f"4 target, {next(iter(changes))}", answer, subject, *says)


def test_4_a_trained_embedding_would_be_replaced(desk: Desk) -> None:
    embed = draft_tensors(desk.target)[EMBED]
    answer = desk.finalize(desk.draft(add={EMBED: embed * 1.5}), NO, *NEVER)
    desk.fails("4 trained embedding", answer, EMBED, "trained")


# -------------------------------------------------------------- 5: the tying flag
def test_5_a_tying_flag_of_the_layers_only(desk: Desk) -> None:
    answer = desk.finalize(desk.draft(layer={"tie_word_embeddings": True}))
    desk.ok("5 nested flag", answer)
    assert answer.config["tie_word_embeddings"] is False
    assert "tie_word_embeddings" in {f["subject"] for f in answer.of("info")}


def test_5_a_whole_vocabulary_with_a_tied_target(desk: Desk) -> None:
    target = make_target(desk.root / "T1", tied=True)
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    source = desk.draft(
        target=target,
        add={HEAD: embed.clone()},
        drop=("d2t", "t2d"),
        draft_vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    answer = desk.ok("5 whole vocabulary", desk.finalize(source))
    assert same_bits(answer.tensors[HEAD], embed)
    assert answer.manifest["tensors"][HEAD]["role"] == "frozen"


# ---------------------------------------------------------------- 7: token maps
def test_7_maps_of_other_forms(desk: Desk) -> None:
    valid = draft_tensors()["d2t"]
    answer = desk.ok("7 int32", desk.finalize(desk.draft(add={"d2t": valid.int()})))
    assert same_bits(answer.tensors["d2t"], valid)
    desk.ok("7 no t2d", desk.finalize(desk.draft(drop=("t2d",)), NO))
    answer = desk.finalize(desk.draft(drop=("d2t",)), NO)
    desk.fails("7 no d2t", answer, "d2t", "draft_vocab_size")
    whole = {"draft_vocab_size": VOCAB, "drop": ("t2d",)}
    head = load_file(desk.target / "model.safetensors")["lm_head.weight"]
    answer = desk.finalize(desk.draft(add={HEAD: head}, **whole), NO)
    desk.fails("7 map of a whole vocabulary", answer, "d2t", "draft_vocab_size")


@pytest.mark.parametrize(
    "name, change, subject, says",
    [
        ("below zero", lambda d: _put(d, 0, -1), "d2t", "target id -1"),
        ("overflow", lambda d: _put(d, 11, 2**63 - 1), "d2t", "none of 32"),
        ("falling", lambda d: _put(_put(d, 0, 2), 1, -1), "d2t", "do not rise"),
        ("two axes", lambda d: d.reshape(3, 4), "d2t", "[3, 4]"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " in v else "",
)
def test_7_other_broken_offsets(
    desk: Desk,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    subject: str,
    says: str,
) -> None:
    source = desk.draft(add={"d2t": change(draft_tensors()["d2t"])}, drop=("t2d",))
    desk.fails(f"7 {name}", desk.finalize(source, NO), subject, says)


def _put(values: torch.Tensor, at: int, value: int) -> torch.Tensor:
    changed = values.clone()
    changed[at] = value
    return changed


def test_7_a_mask_of_another_length_or_kind(desk: Desk) -> None:
    mask = draft_tensors()["t2d"]
    answer = desk.finalize(desk.draft(add={"t2d": mask[:31].clone()}), NO)
    desk.fails("7 short mask", answer, "t2d", "[31]", "[32]")
    answer = desk.finalize(desk.draft(add={"t2d": mask.float()}), NO)
    desk.fails("7 float mask", answer, "t2d", "F32", "BOOL")


def test_7_hand_made_folders_with_a_broken_map(desk: Desk) -> None:
    """SGLang takes any name that holds ``d2t`` for the map."""
    folder = hand_made(desk)
    path = folder / "model.safetensors"
    held = load_file(path)
    d2t = held.pop("d2t")
    save_file(held, path, {"format": "pt"})
    desk.fails("7 verify, no map", desk.verify(folder), "d2t", "no tensor sets it")
    save_file(held | {"draft.d2t.map": d2t}, path, {"format": "pt"})
    desk.ok("7 verify, other name", desk.verify(folder))
    save_file(held | {"d2t": _put(d2t, 3, 37)}, path, {"format": "pt"})
    desk.fails("7 verify, id 40", desk.verify(folder), "d2t", "40", "32")
    save_file(held | {"d2t": d2t.float()}, path, {"format": "pt"})
    desk.fails("7 verify, float", desk.verify(folder), "d2t", "F32")
    save_file(held | {"d2t": d2t, "x.d2t": d2t.clone()}, path, {"format": "pt"})
    desk.fails("7 verify, two maps", desk.verify(folder), "x.d2t", "last one wins")


# ---------------------------------------------------------------- 8: values
@pytest.mark.parametrize(
    "name, value, says",
    [
        ("norm.weight", torch.tensor([math.inf] + [1.0] * 7), "infinite"),
        ("layers.0.hidden_norm.weight", torch.zeros(H), "zero"),
        ("layers.0.self_attn.o_proj.weight", -torch.zeros(H, H), "zero"),
        ("verifier_norm.weight", torch.full((H,), math.nan), "NaN"),
        (HEAD, torch.zeros(DRAFT, H), "zero"),
        (EMBED, torch.zeros(VOCAB, H), "zero"),
        ("fc.weight", torch.zeros(24, H), "[24, 8]"),
        ("layers.0.self_attn.k_proj.weight", torch.ones(H, H), "[8, 8]"),
        ("fc.weight", torch.ones(H, 24).to(torch.float8_e4m3fn), "F8_E4M3"),
        ("fc.weight", torch.ones(H, 24, dtype=torch.int32), "I32"),
        ("layers.0.mlp.extra.weight", torch.ones(2), "no rule"),
        ("layers.1.mlp.up_proj.weight", torch.ones(INNER, H), "no such layer"),
    ],
)
def test_8_other_impossible_tensors(
    desk: Desk, name: str, value: torch.Tensor, says: str
) -> None:
    if value.dtype == torch.float32:
        value = value.bfloat16()
    answer = desk.finalize(desk.draft(add={name: value}), NO)
    desk.fails(f"8 {name} {says}", answer, name, says)


def test_8_nan_in_the_last_shard(desk: Desk) -> None:
    source, weight_map = sharded(desk)
    path = source / weight_map["norm.weight"]
    held = load_file(path)
    held["norm.weight"][3] = math.nan
    save_file(held, path, {"format": "pt"})
    desk.fails("8 NaN in a shard", desk.finalize(source, NO), "norm.weight", "[3]")


def test_8_a_value_beyond_the_range_of_the_chosen_dtype(desk: Desk) -> None:
    base = draft_tensors(desk.target)["fc.weight"].clone()
    base[2, 5] = 1e6
    source = desk.draft(add={"fc.weight": base})
    desk.ok("8 1e6 in bfloat16", desk.finalize(source, NO))
    answer = desk.finalize(source, NO, "--dtype", "float16")
    desk.fails("8 1e6 in float16", answer, "fc.weight", "[2, 5]", "F16")


def test_8_a_missing_tensor(desk: Desk) -> None:
    for name in ("fc.weight", "norm.weight", "layers.0.self_attn.k_proj.weight"):
        answer = desk.finalize(desk.draft(drop=(name,)), NO)
        desk.fails(f"8 without {name}", answer, name, "not in the checkpoint")


# ------------------------------------------------------------------ 10: layer ids
@pytest.mark.parametrize(
    "ids, says",
    [
        ([], "not recorded"),
        ([1, 3, 3], "twice"),
        ([1, 3, 7], "id 7"),
        ([1, 3, 6], "id 6"),
        ([-1, 3, 4], "id -1"),
        ([1, True, 4], "True"),
        ([1, "3", 4], "'3'"),
        ("1,3,4", "a list"),
        ([1.0, 3.0, 4.0], "1.0"),
    ],
    ids=str,
)
def test_10_other_lists(desk: Desk, ids: Any, says: str) -> None:
    answer = desk.finalize(desk.draft(**{IDS: ids}), NO)
    desk.fails(f"10 {ids}", answer, IDS, says)


def test_10_one_auxiliary_layer_skips_fc(desk: Desk) -> None:
    source = desk.draft(add=wide_fc(desk, 8), **{IDS: [3]})
    answer = desk.finalize(source, NO, *NEVER)
    desk.fails("10 one layer, stock", answer, IDS, "skips fc")
    answer = desk.ok("10 one layer, plug-in", desk.finalize(source))
    assert answer.data["requires_plugin"]


def test_10_the_order_of_the_list_does_not_matter(desk: Desk) -> None:
    """Both stacks capture in the order of the layers, whatever the list says."""
    answer = desk.ok("10 [4, 1, 3]", desk.finalize(desk.draft(**{IDS: [4, 1, 3]})))
    assert answer.config["eagle_config"][IDS] == [0, 2, 3]


def test_10_verify_with_a_target_that_is_too_shallow(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    shallow = make_target(desk.root / "T1", weights=False, num_hidden_layers=3)
    answer = desk.verify(export, "--target", shallow)
    subject = f"eagle_config.{IDS}"
    desk.fails("10 verify, 3 layers", answer, subject, "3 layers")


# --------------------------------------------------------- 17: flags and tensors
def test_17_other_flags_without_their_tensors(desk: Desk) -> None:
    chunks = {f"fc_norm.{j}.weight": norm(H) for j in range(4)}
    some = {k: v for k, v in chunks.items() if k[8] != "1" and k[8] != "3"}
    answer = desk.finalize(desk.draft(add=some, fc_norm=True), NO)
    desk.fails("17 one fc_norm missing", answer, "fc_norm.1.weight", "fc_norm")
    answer = desk.finalize(desk.draft(add=chunks, fc_norm=True), NO)
    desk.fails("17 one fc_norm too many", answer, "fc_norm.3.weight", "no such")
    both = {k: v for k, v in chunks.items() if k[8] != "3"}
    both["input_norm.weight"] = norm(24)
    answer = desk.finalize(desk.draft(add=both, fc_norm=True, norm_before_fc=True), NO)
    desk.fails("17 two kinds of norms", answer, "fc_norm", "both")


def test_17_a_flag_that_is_no_boolean(desk: Desk) -> None:
    for flag in ("norm_before_residual", "norm_before_fc", "norm_output"):
        answer = desk.finalize(desk.draft(**{flag: "true"}), NO)
        desk.fails(f"17 {flag} 'true'", answer, flag, "'true'")


def test_17_biases_that_the_flag_denies(desk: Desk) -> None:
    name = "layers.0.self_attn.v_proj.bias"
    answer = desk.finalize(desk.draft(add={name: norm(H)}), NO)
    desk.fails("17 bias, flag false", answer, name, "attention_bias is false")
    answer = desk.finalize(desk.draft(layer={"attention_bias": True}), NO)
    desk.fails("17 flag true, no bias", answer, name, "attention_bias is true")


def test_17_hand_made_folders_with_flags_that_do_not_act(desk: Desk) -> None:
    folder = hand_made(desk, norm_before_fc=True)
    # The nested key wins in SGLang: this folder builds no norm.
    desk.ok("17 verify, nested flag wins", desk.verify(folder))
    folder = hand_made(desk, fc_norm=True)
    answer = desk.verify(folder)
    desk.fails("17 verify, fc_norm unset", answer, "fc_norm.2.weight", "at ones")
    folder = hand_made(desk, norm_before_residual=True)
    answer = desk.verify(folder)
    desk.fails("17 verify, residual", answer, "norm_before_residual", "true")
    folder = hand_made(desk, hidden_act="gelu")
    desk.fails("17 verify, gelu", desk.verify(folder), "hidden_act", "gelu", "silu")
