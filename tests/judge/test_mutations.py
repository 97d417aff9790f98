"""Negative controls: broken exports fail, and the diagnosis names what is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Draft, make_draft, serving_tensors, write_export

from spec_export.judge import layout_leg

Tensors = dict[str, torch.Tensor]


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def edit(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def change(tensors: Tensors) -> None:
        tensors[name] = how(tensors[name])

    return change


def drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def rename(name: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[other] = tensors.pop(name)

    return change


def reorder(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(t.shape[dim], generator=torch.Generator().manual_seed(5))
        return t.index_select(dim, order)

    return change


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(len(d2t))


def one_entry_off(d2t: torch.Tensor) -> torch.Tensor:
    out = d2t.clone()
    out[7] += 1
    return out


# What the leg has to say: (id, change of the tensors, words of reason or diagnosis).
L0, L1 = "layers.0", "layers.1"
BROKEN_TENSORS: list[tuple[str, Callable[[Tensors], None], list[str]]] = [
    (
        "layer 1 norm absent",
        drop(f"{L1}.hidden_norm.weight"),
        [
            "first difference: layer 1 input norm; layers.1.hidden_norm.weight is",
            "all ones in the serving model: no tensor of that name in the export",
        ],
    ),
    (
        "layer 1 norm not renamed",
        rename(f"{L1}.hidden_norm.weight", f"{L1}.input_layernorm.weight"),
        ["layer 1 input norm; layers.1.hidden_norm.weight is all ones"],
    ),
    (
        "layer 0 norms swapped",
        swap(f"{L0}.hidden_norm.weight", f"{L0}.input_layernorm.weight"),
        [
            "layer 0 embedding norm; layers.0.input_layernorm.weight holds",
            "what training calls layers.0.hidden_norm.weight",
        ],
    ),
    (
        "final norm absent",
        drop("norm.weight"),
        ["final norm; norm.weight is all ones"],
    ),
    (
        "post-attention norms of the layers swapped",
        swap(
            f"{L0}.post_attention_layernorm.weight",
            f"{L1}.post_attention_layernorm.weight",
        ),
        ["layer 0 post-attention norm", "holds what training calls layers.1"],
    ),
    (
        "features norm not exported",
        drop("input_norm.weight"),
        ["features norm; input_norm.weight is all ones"],
    ),
    (
        "fc columns in another order",
        edit("fc.weight", reorder(1)),
        ["fused features; fc.weight has the columns of fc.weight in another order"],
    ),
    (
        "fc columns shifted",
        edit("fc.weight", lambda t: t.roll(1, 1)),
        ["fused features; fc.weight has the columns of fc.weight shifted by 1"],
    ),
    (
        "o_proj transposed",
        edit(f"{L0}.self_attn.o_proj.weight", lambda t: t.T),
        ["layer 0 attention output", "transposed"],
    ),
    (
        "o_proj of layer 1 negated",
        edit(f"{L1}.self_attn.o_proj.weight", torch.neg),
        ["layer 1 attention output", "negated"],
    ),
    (
        "k and v swapped",
        swap(f"{L0}.self_attn.k_proj.weight", f"{L0}.self_attn.v_proj.weight"),
        ["layer 0 k", "holds what training calls layers.0.self_attn.v_proj.weight"],
    ),
    (
        "q absent",
        drop(f"{L0}.self_attn.q_proj.weight"),
        ["layers.0.self_attn.qkv_proj.weight[q] is uninitialised memory"],
    ),
    (
        "q under an unknown name",
        rename(f"{L0}.self_attn.q_proj.weight", f"{L0}.attn.q_proj.weight"),
        ["qkv_proj.weight[q] is uninitialised memory"],
    ),
    (
        "gate and up swapped",
        swap(f"{L1}.mlp.gate_proj.weight", f"{L1}.mlp.up_proj.weight"),
        ["layer 1 MLP gate", "holds what training calls layers.1.mlp.up_proj.weight"],
    ),
    (
        "down_proj stale",
        edit(f"{L1}.mlp.down_proj.weight", lambda t: t * 1.01),
        ["layer 1 MLP output; layers.1.mlp.down_proj.weight differs from"],
    ),
    (
        "head rows shifted",
        edit("lm_head.weight", lambda t: t.roll(1, 0)),
        ["logits; lm_head.weight has the rows of lm_head.weight shifted by 1"],
    ),
    ("absolute d2t", edit("d2t", absolute), ["d2t holds absolute ids"]),
    ("d2t absent", drop("d2t"), ["no d2t tensor in the export"]),
    ("one entry of d2t", edit("d2t", one_entry_off), ["d2t sends 1 of 48 draft ids"]),
    (
        "a nan",
        edit("fc.weight", lambda t: t.index_fill(1, torch.tensor(3), torch.nan)),
        ["fused features; fc.weight differs"],
    ),
]

BROKEN_CONFIG: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "norm_output lost",
        {"norm_output": ...},
        ["step 1, recurrent state; config key norm_output: False"],
    ),
    (
        "norm_before_fc lost",
        {"norm_before_fc": ...},
        ["features norm; config key norm_before_fc: False"],
    ),
    (
        "fc_norm made up",
        {"fc_norm": True},
        ["feature norm 0; config key fc_norm: True"],
    ),
    (
        "rope base",
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}},
        ["layer 0 attention; rotary embedding: rope_theta 10000.0"],
    ),
    (
        "rope scaling made up",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        ["rotary embedding: factor 2.0"],
    ),
    (
        "partial rotary",
        {"partial_rotary_factor": 0.5},
        ["partial_rotary_factor turns 4 channels"],
    ),
    (
        "gpt-j style",
        {"rope_is_neox_style": False},
        ["config key rope_is_neox_style"],
    ),
    ("eps", {"rms_norm_eps": 1e-3}, ["features norm; config key rms_norm_eps: 0.001"]),
    ("eps lost", {"rms_norm_eps": ...}, ["config key rms_norm_eps: 1e-06"]),
    (
        "heads",
        {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1},
        ["heads, kv heads, head_dim: (2, 1, 16)"],
    ),
    (
        "dtype lost",
        {"dtype": ..., "torch_dtype": ...},
        ["features norm; input_norm.weight is rounded", "float16"],
    ),
    ("tied", {"tie_word_embeddings": True}, ["logits; config key tie_word_embeddings"]),
    ("activation", {"hidden_act": "gelu"}, ["only silu is supported"]),
    ("null target width", {"target_hidden_size": None}, ["target_hidden_size is null"]),
    ("no draft vocabulary", {"draft_vocab_size": ...}, ["draft_vocab_size is absent"]),
    ("smaller vocabulary", {"draft_vocab_size": 40}, ["lm_head.weight has shape"]),
    ("fewer features", {"num_aux_hidden_states": 2}, ["fc.weight has shape"]),
    ("layers", {"num_hidden_layers": 3}, ["layers.2", "uninitialised memory"]),
    ("fewer layers", {"num_hidden_layers": 1}, ["logits differ"]),
    ("fc bias", {"bias": True}, ["fc.bias is uninitialised memory"]),
]


@pytest.fixture(scope="module")
def draft() -> Draft:
    return make_draft(2, 48, norm_output=True, norm_before_fc=True)


def said(leg: Any) -> str:
    return "\n".join((leg.reason, *leg.diagnosis))


def judge(folder: Path, draft: Draft, **more: Any) -> Any:
    return layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed, **more)


def test_the_unbroken_one_passes(tmp_path: Path, draft: Draft) -> None:
    leg = judge(write_export(tmp_path / "e", draft), draft)
    assert leg.passed, said(leg)
    assert leg.free_running and leg.diagnosis == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [pytest.param(c, w, id=i.replace(" ", "-")) for i, c, w in BROKEN_TENSORS],
)
def test_broken_tensor(
    tmp_path: Path, draft: Draft, change: Callable[[Tensors], None], words: list[str]
) -> None:
    tensors = serving_tensors(draft)
    change(tensors)
    leg = judge(write_export(tmp_path / "e", draft, tensors=tensors), draft)
    assert leg.verdict == "fail"
    for word in words:
        assert word in said(leg)


@pytest.mark.parametrize(
    ("config", "words"),
    [pytest.param(c, w, id=i.replace(" ", "-")) for i, c, w in BROKEN_CONFIG],
)
def test_broken_config(
    tmp_path: Path, draft: Draft, config: dict[str, Any], words: list[str]
) -> None:
    leg = judge(write_export(tmp_path / "e", draft, **config), draft)
    assert leg.verdict == "fail"
    for word in words:
        assert word in said(leg)


def test_another_target(tmp_path: Path, draft: Draft) -> None:
    folder = write_export(tmp_path / "e", draft)
    other = draft.embed.roll(1, 0)
    leg = layout_leg(folder, draft.module, draft.inputs(), embed=other)
    assert leg.verdict == "fail"
    assert "embedding; embed_tokens.weight (the target's) differs" in said(leg)


def test_norm_before_residual_on_the_stock_class(tmp_path: Path) -> None:
    draft = make_draft(1, norm_before_residual=True)
    stock = judge(write_export(tmp_path / "stock", draft), draft)
    assert stock.verdict == "fail"
    assert "config key norm_before_residual: False" in said(stock)
    plugin = judge(write_export(tmp_path / "plugin", draft, plugin=True), draft)
    assert plugin.passed, said(plugin)


def test_one_auxiliary_layer_skips_fc(tmp_path: Path) -> None:
    draft = make_draft(1, aux_ids=(3,))
    leg = judge(write_export(tmp_path / "e", draft), draft)
    assert leg.verdict == "fail"
    assert "fused features; SGLang skips fc" in said(leg)


def test_window_needs_its_flag(tmp_path: Path) -> None:
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 6}
    draft = make_draft(1, layer=layer)
    folder = write_export(tmp_path / "e", draft)
    assert judge(folder, draft, window=5).passed
    leg = judge(folder, draft)
    assert leg.verdict == "fail"
    assert "attention window: 6 keys in training, all in the serving model" in said(leg)


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("0.5.16", "config key norm_before_fc: False"),
        ("0.5.11", "2 layers: EAGLE-3 supports one before 0.5.12"),
    ],
)
def test_older_release(tmp_path: Path, draft: Draft, release: str, words: str) -> None:
    leg = judge(write_export(tmp_path / "e", draft), draft, release=release)
    assert leg.verdict == "fail"
    assert words in said(leg)
