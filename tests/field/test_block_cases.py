"""The cases from the field that block drafts can meet, numbered as in test_cases.py.

F0 is a DFlash draft and S0 a DSpark draft, for the target T0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.field.desk import Desk, copy_export, same_bits
from tests.helpers.field import (
    DIM,
    DRAFT,
    HEADS,
    INNER,
    VOCAB,
    H,
    Tensors,
    draft_config,
    draft_ids,
    make_target,
    random_values,
    write_draft,
)

NO = "--no-compare"
IDS = "aux_hidden_state_layer_ids"
LAYERS = {
    "layer_types": ["full_attention", "full_attention"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "mlp_bias": ...,
}


def tokens(count: int | None) -> dict[str, Any]:
    """``speculators_config`` with this many speculative tokens."""
    config = draft_config(None)["speculators_config"]
    config["proposal_methods"][0]["speculative_tokens"] = count
    return config


def block_config(target: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """F0's or S0's config.json as speculators 0.9 writes it; ``...`` removes a key."""
    layer = {**LAYERS, **changes.pop("layer", {})}
    gone = ("eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "fc_norm")
    gone += ("norm_before_fc", "norm_before_residual", "norm_output")
    anchor = kind == "dspark"
    mine: dict[str, Any] = {
        "speculators_model_type": kind,
        "draft_vocab_size": VOCAB,
        "block_size": 4,
        "mask_token_id": 31,
        IDS: [2, 3, 5],
        "sample_from_anchor": anchor,
        "sliding_window_non_causal": False,
    }
    if kind == "dspark":
        mine |= {
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    mine |= dict.fromkeys(gone, ...) | changes
    config = draft_config(target, layer=layer, **mine)
    if "speculators_config" not in changes:
        found = config["speculators_config"]["proposal_methods"][0]
        found["speculative_tokens"] = 4 if config.get("sample_from_anchor") else 3
    return config


def block_tensors(kind: str, draft_vocab: int = VOCAB) -> Tensors:
    """F0's or S0's tensors, as slim as speculators saves them."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(2):
        layer = f"layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (H,)
        for part in "qkvo":
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (H, H)
        for part in "qk":
            shapes[f"{layer}.self_attn.{part}_norm.weight"] = (DIM,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (INNER, H)
        shapes[f"{layer}.mlp.up_proj.weight"] = (INNER, H)
        shapes[f"{layer}.mlp.down_proj.weight"] = (H, INNER)
    if kind == "dspark":
        shapes["markov_head.markov_w1.weight"] = (VOCAB, 4)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, 4)
        shapes["confidence_head.proj.weight"] = (1, H + 4)
        shapes["confidence_head.proj.bias"] = (1,)
    return random_values(3, shapes)


def block(
    desk: Desk,
    kind: str = "dflash",
    *,
    target: Path | None = None,
    add: Tensors | None = None,
    drop: tuple[str, ...] = (),
    reduced: bool = False,
    **config: Any,
) -> Path:
    """Write F0 or S0 with changes."""
    target = target or desk.target
    held = block_tensors(kind, DRAFT if reduced else VOCAB)
    if reduced:
        config["draft_vocab_size"] = DRAFT
        ids, mask = draft_ids(), torch.zeros(VOCAB, dtype=torch.bool)
        mask[ids] = True
        head = load_file(desk.target / "model.safetensors")["lm_head.weight"]
        held |= {"d2t": ids - torch.arange(DRAFT), "t2d": mask}
        held["lm_head.weight"] = head[ids].clone()
    held = {k: v for k, v in (held | (add or {})).items() if k not in drop}
    return write_draft(desk.new(kind), block_config(target, kind, **config), held)


# --------------------------------------------------------- 1: flattened and re-based
def test_case_1_the_configuration_is_flattened_and_rebased(desk: Desk) -> None:
    source = block(desk, "dspark")
    answer = desk.ok("1", desk.finalize(source))
    config = answer.config
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["hidden_size"], config["head_dim"]) == (H, DIM)
    assert config["num_hidden_layers"] == 2
    assert config["num_attention_heads"] == HEADS
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert config.get("target_layer_ids", [1, 2, 4]) == [1, 2, 4]
    assert config["num_target_layers"] == 6
    assert config["block_size"] == 4
    assert config["mask_token_id"] == config["dflash_config"]["mask_token_id"] == 31
    assert (config["markov_rank"], config["markov_head_type"]) == (4, "vanilla")
    assert config["sample_from_anchor"] is True
    assert not {"transformer_layer_config", "auto_map"} & set(config)
    trained = load_file(source / "model.safetensors")
    assert set(answer.tensors) == set(trained)
    assert all(same_bits(answer.tensors[name], trained[name]) for name in trained)


def test_case_1_a_draft_vocabulary_takes_one_more_rank(desk: Desk) -> None:
    answer = desk.ok("1 reduced", desk.finalize(block(desk, "dspark", reduced=True)))
    assert answer.config["markov_rank"] == 5
    w2 = answer.manifest["tensors"]["markov_head.markov_w2.weight"]
    assert w2["role"] == "derived" and w2["transform"].startswith("scatter-rows(")
    assert w2["source"] == ["markov_head.markov_w2.weight", "d2t"]
    table = answer.tensors["markov_head.markov_w2.weight"]
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[draft_ids()] = False
    assert (table[outside, 4] < -9000).all() and not table[~outside, 4].any()


# ----------------------------------------------------------------- 4: slim, no head
@pytest.mark.parametrize("tied", [False, True])
def test_case_4_no_head_is_shipped(desk: Desk, tied: bool) -> None:
    target = make_target(desk.root / "T0-too", tied=tied)
    answer = desk.finalize(block(desk, target=target), "--target", target)
    desk.ok(f"4 F0 {'tied' if tied else 'untied'}", answer)
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(answer.tensors)
    assert answer.manifest["target_model"]["head"] == ("tied" if tied else "own")
    provided = {p["name"] for p in answer.manifest["provided_by_target"]}
    assert provided == {"embed_tokens.weight", "lm_head.weight"}


def test_case_4_without_the_target_no_layer_ids(desk: Desk) -> None:
    source = block(desk, target=Path("/nowhere/T0"))
    answer = desk.finalize(source, NO)
    assert answer.code == 1 and not answer.output.exists()
    assert any(f["code"] == "target-needed" for f in answer.of("error"))


# ----------------------------------------------------------- 10: auxiliary layer ids
def test_case_10_the_last_layer_of_a_llama(desk: Desk) -> None:
    answer = desk.finalize(block(desk, **{IDS: [2, 4, 6]}), NO)
    desk.fails("10 (c)", answer, IDS, "id 6", "LlamaForCausalLM")


def test_case_10_an_id_that_does_not_exist(desk: Desk) -> None:
    answer = desk.finalize(block(desk, **{IDS: [2, 4, 7]}), NO)
    desk.fails("10 (d)", answer, IDS, "7", "6 layers")


def test_case_10_the_embedding_output_of_a_block_draft(desk: Desk) -> None:
    answer = desk.finalize(block(desk, **{IDS: [0, 3, 5]}), NO)
    desk.fails("10 (e) F0", answer, IDS, "id 0")


# ------------------------------------------------------------------ 15: anchor layout
@pytest.mark.parametrize(("anchor", "size", "count"), [(True, 4, 4), (False, 3, 3)])
def test_case_15_block_size_counts_proposals(
    desk: Desk, anchor: bool, size: int, count: int
) -> None:
    source = block(
        desk, "dspark", sample_from_anchor=anchor, speculators_config=tokens(count)
    )
    # The configuration names no target then.
    answer = desk.finalize(source, "--target", desk.target)
    desk.ok(f"15 {anchor}", answer)
    assert answer.config["sample_from_anchor"] is anchor
    assert answer.config["block_size"] == size


def test_case_15_a_layout_that_nothing_states(desk: Desk) -> None:
    source = block(desk, "dspark", sample_from_anchor=...)
    desk.fails(
        "15 absent", desk.finalize(source, NO), "sample_from_anchor", "is missing"
    )


def test_case_15_a_release_that_starts_at_the_anchor_always(desk: Desk) -> None:
    source = block(desk, "dspark", sample_from_anchor=False)
    answer = desk.finalize(source, NO, "--sglang", "0.5.18")
    desk.fails("15 (ii) false", answer, "sample_from_anchor", "0.5.19", "0.5.18")


def test_case_15_a_count_that_contradicts_the_layout(desk: Desk) -> None:
    source = block(desk, "dspark", speculators_config=tokens(3))
    answer = desk.finalize(source, NO, "--target", desk.target)
    subject = "speculators_config.proposal_methods.0.speculative_tokens"
    desk.fails("15 contradiction", answer, subject, "is 3", "sample_from_anchor True")


# ------------------------------------------------------------- 17: flags and tensors
def test_case_17_a_confidence_head_without_tensors(desk: Desk) -> None:
    gone = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    answer = desk.finalize(block(desk, "dspark", drop=gone), NO)
    desk.fails("17 (d)", answer, gone[0], "enable_confidence_head is true")


def test_case_17_half_a_markov_head(desk: Desk) -> None:
    name = "markov_head.markov_w1.weight"
    answer = desk.finalize(block(desk, "dspark", drop=(name,)), NO)
    desk.fails("17 (e)", answer, name, "markov_rank is 4")


def test_case_17_a_markov_head_that_the_rank_denies(desk: Desk) -> None:
    source = block(desk, "dspark", markov_rank=0, confidence_head_with_markov=False)
    answer = desk.finalize(source, NO)
    desk.fails("17 rank 0", answer, "markov_head.markov_w1.weight", "markov_rank is 0")


# ------------------------------------------- 19: dtypes, leftover quantisation, heads
@pytest.mark.parametrize(
    ("kind", "reduced"), [("dflash", False), ("dspark", False), ("dspark", True)]
)
def test_case_19_mixed_floats_become_bfloat16(
    desk: Desk, kind: str, reduced: bool
) -> None:
    mixed = {
        k: v.float() if "norm" in k or "markov" in k else v
        for k, v in block_tensors(kind, DRAFT if reduced else VOCAB).items()
    }
    mixed["norm.weight"] = mixed["norm.weight"] + 2**-9  # not a bfloat16 number
    source = block(desk, kind, add=mixed, reduced=reduced, dtype="float16")
    answer = desk.ok(f"19 (a) {kind}", desk.finalize(source))
    assert answer.config["dtype"] == answer.config["torch_dtype"] == "bfloat16"
    assert {v.dtype for v in answer.tensors.values()} == {torch.bfloat16}
    casts = [f for f in answer.manifest["findings"] if f["code"] == "dtype-cast"]
    wide = {k for k, v in mixed.items() if v.dtype == torch.float32}
    (cast,) = casts
    assert f"{len(wide)} tensors" in cast["message"]
    error = (mixed["norm.weight"] - mixed["norm.weight"].bfloat16().float()).abs().max()
    assert "F32" in cast["message"] and "BF16" in cast["message"]
    assert f"{error.item():.3g}, in norm.weight" in cast["message"] and error > 0
    if reduced:  # the map of the draft vocabulary went into a table of floats
        assert "d2t" not in answer.tensors
        assert answer.manifest["vocab"]["draft_size"] == DRAFT


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_case_19_a_leftover_quantization_config(desk: Desk, kind: str) -> None:
    source = block(desk, kind, quantization_config={"quant_method": "awq", "bits": 4})
    answer = desk.warned(
        f"19 (b) {kind}", desk.finalize(source), "quantization_config", "not quantised"
    )
    assert "quantization_config" not in answer.config
    launch = answer.manifest["serving"]["launch"]
    at = launch.index("--speculative-draft-model-quantization")
    assert launch[at + 1] == "unquant"


def test_case_19_a_packed_tensor_is_no_draft(desk: Desk) -> None:
    name = "layers.0.mlp.down_proj.weight"
    packed = torch.ones(H, INNER // 2, dtype=torch.uint8)
    answer = desk.finalize(block(desk, add={name: packed}), NO)
    desk.fails("19 packed", answer, name, "U8")


def test_case_19_a_packed_head_is_the_server_s_matter(desk: Desk) -> None:
    """No block draft ships a head, so a packed one of the target is not copied."""
    target = make_target(desk.root / "T1")
    held = load_file(target / "model.safetensors")
    held["lm_head.weight"] = torch.ones(VOCAB, H // 2, dtype=torch.uint8)
    save_file(held, target / "model.safetensors", {"format": "pt"})
    source = block(desk)
    answer = desk.ok("19 (c)", desk.finalize(source, "--target", target))
    assert answer.manifest["target_model"]["head"] == "packed"
    assert "lm_head.weight" not in answer.tensors
    assert answer.data["verdict"] == "not run"


# -------------------------------------------------------------------- 23: mask token
def test_case_23_beyond_the_embedding(desk: Desk) -> None:
    answer = desk.finalize(block(desk, mask_token_id=VOCAB), NO)
    desk.fails("23 (a)", answer, "mask_token_id", "32")


def test_case_23_equal_to_eos_and_pad(desk: Desk) -> None:
    path = desk.target / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "eos_token_id": [30, 31], "pad_token_id": 31})
    )
    source = block(desk)
    desk.fails("23 (b)", desk.finalize(source, NO), "mask_token_id", "31", "[30, 31]")
    allowed = desk.finalize(source, "--allow", "mask-token-is-special")
    desk.warned("23 (b) allowed", allowed, "mask_token_id", "31")
    assert [d["code"] for d in allowed.manifest["deviations"]] == [
        "mask-token-is-special"
    ]


def test_case_23_two_mask_tokens(desk: Desk) -> None:
    answer = desk.finalize(block(desk, layer={"mask_token_id": 30}), NO)
    desk.fails(
        "23 (c)", answer, "transformer_layer_config.mask_token_id", "is 30", "31"
    )


def test_case_23_no_mask_token(desk: Desk) -> None:
    answer = desk.finalize(block(desk, mask_token_id=None), NO)
    desk.fails("23 (d)", answer, "mask_token_id", "is missing")


def test_case_23_a_row_of_zeros_is_used_as_it_is(desk: Desk) -> None:
    path = desk.target / "model.safetensors"
    held = load_file(path)
    held["model.embed_tokens.weight"][31] = 0
    save_file(held, path, {"format": "pt"})
    answer = desk.warned("23 (e)", desk.finalize(block(desk)), "mask_token_id", "zeros")
    assert answer.config["mask_token_id"] == 31


# ------------------------------------------------- the deployer's side, and rewrites
def test_a_rewrite_is_said(desk: Desk) -> None:
    answer = desk.finalize(block(desk, reduced=True))
    desk.ok("F0 reduced", answer)
    (said,) = [f for f in answer.of("info") if f["code"] == "exact-rewrite"]
    assert "DSPARK" in said["message"] and "reduced-vocabulary" in said["message"]
    assert answer.config["architectures"] == ["Qwen3DSparkModel"]
    verified = desk.verify(answer.output)
    assert verified.code == 0, verified.data["findings"]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_folder_without_manifest_is_checked(desk: Desk, kind: str) -> None:
    answer = desk.ok(f"verify {kind}", desk.finalize(block(desk, kind), NO))
    folder = copy_export(answer.output, desk.new("by-hand"))
    verified = desk.verify(folder)
    assert verified.code == 0, verified.data["findings"]
    tensors = load_file(folder / "model.safetensors")
    tensors["norms.weight"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = desk.verify(folder)
    assert found.code == 1
    subjects = {f["subject"] for f in found.of("error")}
    assert subjects == {"norm.weight", "norms.weight"}


@pytest.mark.parametrize(
    ("kind", "config", "subject"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 31}}, "target_layer_ids"),
        (
            "dflash",
            {
                "mask_token_id": 40,
                "dflash_config": {"target_layer_ids": [1, 2, 4], "mask_token_id": 40},
            },
            "mask_token_id",
        ),
        (
            "dflash",
            {"dflash_config": {"target_layer_ids": [1, 2, 6], "mask_token_id": 31}},
            "dflash_config.target_layer_ids",
        ),
        ("dspark", {"target_layer_ids": [-1, 2, 4]}, "target_layer_ids"),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("dspark", {"markov_rank": ...}, "markov_rank"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head.gate_proj.weight"),
    ],
)
def test_a_hand_made_configuration_that_does_not_work(
    desk: Desk, kind: str, config: dict[str, Any], subject: str
) -> None:
    answer = desk.ok(f"by hand {kind}", desk.finalize(block(desk, kind), NO))
    folder = copy_export(answer.output, desk.new("by-hand"), **config)
    verified = desk.verify(folder)
    assert verified.code == 1
    assert any(subject in f["subject"] for f in verified.of("error"))
