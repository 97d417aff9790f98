"""The training side from a checkpoint: the real class, filled tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafts import make_draft, write_export

from spec_export.findings import SpecExportError
from spec_export.judge import layout_leg, training_logits, training_module
from spec_export.judge.modes import ChangedWeights, rounded_to


@pytest.mark.parametrize("vocab", [48, 96])
def test_it_is_the_class_that_was_trained(vocab: int) -> None:
    draft = make_draft(2, vocab, norm_output=True, fc_norm=True)
    weights = draft.weights
    module = training_module(draft.config, weights.__getitem__, weights)
    assert type(module) is type(draft.module)
    expected = training_logits(draft.module, draft.inputs())
    seen = training_logits(module, draft.inputs())
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    assert not any(p.is_meta or p.requires_grad for p in module.parameters())


def test_rounded_to_the_saved_dtype() -> None:
    draft = make_draft(1)
    weights = draft.weights
    module = training_module(
        draft.config, weights.__getitem__, weights, saved_dtype=torch.bfloat16
    )
    with ChangedWeights(rounded_to(torch.bfloat16)):
        expected = training_logits(draft.module, draft.inputs())
    seen = training_logits(module, draft.inputs())
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    assert module.embed_tokens.weight.dtype is torch.bfloat16


def test_one_tensor_is_read_at_a_time() -> None:
    draft = make_draft(1)
    order = []

    def read(name: str) -> torch.Tensor:
        order.append(name)
        return draft.weights[name]

    training_module(draft.config, read, draft.weights)
    assert sorted(order) == sorted(draft.weights)


def test_an_absent_embedding_comes_from_the_target() -> None:
    draft = make_draft(1)
    weights = {k: v for k, v in draft.weights.items() if k != "embed_tokens.weight"}
    with pytest.raises(SpecExportError) as caught:
        training_module(draft.config, weights.__getitem__, weights)
    assert [f.subject for f in caught.value.findings] == ["embed_tokens.weight"]
    module = training_module(
        draft.config, weights.__getitem__, weights, target_embedding=draft.embed
    )
    expected = training_logits(draft.module, draft.inputs())
    seen = training_logits(module, draft.inputs())
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))


def test_what_does_not_fit_is_named() -> None:
    draft = make_draft(1)
    weights = dict(draft.weights)
    weights["fc.bias"] = torch.zeros(32)
    weights["norm.weight"] = torch.ones(31)
    del weights["layers.0.hidden_norm.weight"]
    with pytest.raises(SpecExportError) as caught:
        training_module(draft.config, weights.__getitem__, weights)
    found = {(f.code, f.subject) for f in caught.value.findings}
    assert found == {
        ("tensor-unexpected", "fc.bias"),
        ("shape-mismatch", "norm.weight"),
        ("tensor-missing", "layers.0.hidden_norm.weight"),
    }
    with pytest.raises(SpecExportError, match="no training side for draft type"):
        training_module({"speculators_model_type": "peagle"}, weights.get, weights)


def test_bfloat16_on_both_sides(tmp_path: Path) -> None:
    draft = make_draft(2, norm_output=True, dtype=torch.bfloat16)
    weights = draft.weights
    module = training_module(draft.config, weights.__getitem__, weights, torch.bfloat16)
    folder = write_export(tmp_path / "right", draft)
    leg = layout_leg(folder, module, draft.inputs(), embed=draft.embed)
    assert leg.passed, leg.reason
    assert leg.dtype == "bfloat16"
    assert leg.tolerance is not None and "bfloat16 arithmetic" in leg.tolerance.source
    assert 0 < leg.metrics[0].max_rel < leg.tolerance.max_rel < 0.5
    wrong = write_export(tmp_path / "wrong", draft, norm_output=False)
    leg = layout_leg(wrong, module, draft.inputs(), embed=draft.embed)
    assert leg.verdict == "fail"
    assert "config key norm_output" in leg.diagnosis[0]


def test_a_live_module_against_a_bfloat16_export(tmp_path: Path) -> None:
    """What the callback does: float32 masters, an export rounded to bfloat16."""
    live, saved = make_draft(1), make_draft(1, dtype=torch.bfloat16)
    folder = write_export(tmp_path, saved)
    inputs = live.inputs()
    leg = layout_leg(
        folder, live.module, inputs, embed=live.embed, saved_dtype=torch.bfloat16
    )
    assert leg.passed, (leg.reason, leg.diagnosis)
    unrounded = layout_leg(folder, live.module, inputs, embed=live.embed)
    assert unrounded.verdict == "fail"


def test_padding_is_not_compared(tmp_path: Path) -> None:
    draft = make_draft(1)
    inputs = draft.inputs()
    ids = inputs.document_ids.clone()
    ids[-6:] = -1
    folder = write_export(tmp_path, draft)
    padded = replace(inputs, document_ids=ids, seed=None)
    leg = layout_leg(folder, draft.module, padded, embed=draft.embed)
    assert leg.passed, leg.reason
    assert leg.positions == 34
