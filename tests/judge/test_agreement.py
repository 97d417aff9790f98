"""A right export passes: the training class against the serving reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import THETA, make_draft, serving_tensors, write_export
from transformers import Qwen3Config

from spec_export.judge import Inputs, layout_leg
from spec_export.judge.compare import largest
from spec_export.judge.reference import load_reference

LLAMA3 = {
    **THETA,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    **THETA,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
NORMS = {"none": {}, "fc_norm": {"fc_norm": True}, "before": {"norm_before_fc": True}}


@pytest.mark.parametrize("vocab", [48, 96], ids=["reduced", "full"])
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("output", [False, True], ids=["", "norm_output"])
@pytest.mark.parametrize("layers", [1, 2])
def test_all_flags(
    tmp_path: Path, layers: int, output: bool, norms: str, vocab: int
) -> None:
    draft = make_draft(layers, vocab, norm_output=output, **NORMS[norms])
    folder = write_export(tmp_path, draft)
    leg = layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed)
    assert leg.passed, leg.reason
    assert largest(leg.metrics) <= 1e-5
    assert largest(leg.free_running) <= 1e-5
    assert len(leg.metrics) == 3
    assert all(m.kl_max < 1e-8 and m.top1 == 1 for m in leg.metrics)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": ({"rope": LLAMA3}, {}),
    "yarn": ({"rope": YARN}, {}),
    "yarn mscale": ({"rope": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}}, {}),
    "yarn untruncated": ({"rope": {**YARN, "truncate": False, "beta_fast": 20}}, {}),
    "linear": ({"rope": {**THETA, "rope_type": "linear", "factor": 2.0}}, {}),
    "two features": ({"aux_ids": (1, 3)}, {}),
    "sdpa": ({"attention": "sdpa"}, {}),
    "flex": ({"attention": "simple_flex_attention"}, {}),
    "plugin, norm_before_residual": (
        {"layers": 2, "norm_before_residual": True, "norm_output": True},
        {"plugin": True},
    ),
    "plugin, qwen3 with biases": (
        {
            "layers": 2,
            "arch": Qwen3Config,
            "norm_before_residual": True,
            "layer": {"attention_bias": True},
        },
        {"plugin": True},
    ),
    "plugin, all biases": (
        {"layers": 2, "layer": {"attention_bias": True, "mlp_bias": True}},
        {"plugin": True},
    ),
    "plugin, one feature": ({"aux_ids": (3,)}, {"plugin": True}),
    "plugin, mixed windows": (
        {
            "layers": 2,
            "layer": {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
            },
        },
        {"plugin": True},
    ),
    "bfloat16 on disk": ({"dtype": torch.bfloat16}, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(tmp_path: Path, name: str) -> None:
    how, writing = VARIANTS[name]
    draft = make_draft(**how)
    folder = write_export(tmp_path, draft, **writing)
    module = draft.module.float()
    leg = layout_leg(folder, module, draft.inputs(), embed=draft.embed)
    assert leg.passed, (leg.reason, leg.diagnosis)
    assert largest(leg.metrics) <= 1e-5


def both_forms(
    reference: Any, inputs: Inputs, row: int, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one row's chain [steps, V]: as a server has them, and unrolled."""
    prefix = slice(0, row + 1)
    free, chosen = reference.free_running(
        inputs.token_ids[prefix], inputs.aux[prefix], inputs.position_ids[prefix], steps
    )
    tokens = inputs.token_ids.clone()
    tokens[row + 1 : row + steps] = reference.to_target(chosen[:-1])
    forced = reference.teacher_forced(
        tokens, inputs.aux, inputs.position_ids, inputs.document_ids, steps
    )
    return free, torch.stack([step[row] for step in forced])


@pytest.mark.parametrize("layers", [1, 2])
def test_teacher_forced_and_free_running_agree(tmp_path: Path, layers: int) -> None:
    """Given the same tokens, the unrolled form is what a server computes."""
    draft = make_draft(layers, norm_output=True)
    reference = load_reference(write_export(tmp_path, draft), embed=draft.embed)
    inputs, steps, row = draft.inputs(), 4, 9
    free, forced = both_forms(reference, inputs, row, steps)
    assert (forced - free).abs().max() < 1e-5 * (free.max() - free.min())
    # The control: tokens the draft did not choose give other logits.
    other = reference.teacher_forced(
        inputs.token_ids, inputs.aux, inputs.position_ids, inputs.document_ids, steps
    )
    assert float((other[1][row] - free[1]).abs().max()) > 0.01


def test_a_window_slides_in_a_server_only(tmp_path: Path) -> None:
    draft = make_draft(1)
    folder = write_export(tmp_path, draft)
    inputs, steps = draft.inputs(), 3

    def apart(window: int, row: int) -> list[float]:
        reference = load_reference(folder, embed=draft.embed, window=window)
        free, forced = both_forms(reference, inputs, row, steps)
        found: list[float] = (forced - free).abs().amax(-1).tolist()
        return found

    inside = apart(window=12, row=9)
    assert max(inside) < 1e-5
    across = apart(window=4, row=9)
    assert across[0] < 1e-5 < min(across[1:])


def test_names_do_not_matter_where_sglang_takes_several(tmp_path: Path) -> None:
    """`model.`, `layers.0.`, fused q/k/v and the legacy feature norms load alike."""
    draft = make_draft(1, fc_norm=True)
    tensors = {}
    legacy = dict(enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")))
    for name, value in serving_tensors(draft).items():
        name = name.replace("midlayer", "layers.0")
        for j, old in legacy.items():
            name = name.replace(f"fc_norm.{j}", old)
        prefix = "" if name.startswith(("lm_head", "d2t")) else "model."
        tensors[prefix + name] = value
    attention = "model.layers.0.self_attn"
    parts = [tensors.pop(f"{attention}.{p}_proj.weight") for p in "qkv"]
    tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
    folder = write_export(tmp_path, draft, tensors=tensors, fc_norm=..., use_aux_norm=1)
    leg = layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed)
    assert leg.passed, (leg.reason, leg.diagnosis)


def test_a_null_draft_vocabulary_takes_the_targets_head(tmp_path: Path) -> None:
    draft = make_draft(1, 96)
    tensors = serving_tensors(draft)
    head = tensors.pop("lm_head.weight")
    folder = write_export(tmp_path, draft, tensors=tensors, draft_vocab_size=None)
    inputs = draft.inputs()
    leg = layout_leg(folder, draft.module, inputs, embed=draft.embed, head=head)
    assert leg.passed, leg.reason
    other = head.roll(1, 0)
    leg = layout_leg(folder, draft.module, inputs, embed=draft.embed, head=other)
    assert leg.verdict == "fail"
    assert "logits; lm_head.weight (the target's) has the rows" in leg.diagnosis[0]
