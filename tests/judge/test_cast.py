"""Leg 1 and the training side: a live module is looked at, never touched."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from drafts import Draft, make_draft
from torch import nn

from spec_export.judge import Inputs, cast_leg, training_logits
from spec_export.judge.modes import ChangedWeights, ReorderedSums, rounded_to


@pytest.fixture
def one_process() -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def in_training(draft: Draft) -> Draft:
    draft.module.train()
    draft.module.layers[0].mlp.eval()
    return draft


def test_the_leg_equals_a_cast_copy() -> None:
    draft, copy = make_draft(2), make_draft(2)
    inputs = draft.inputs()
    leg = cast_leg(draft.module, inputs, torch.bfloat16)
    for name, parameter in copy.module.named_parameters():
        if not name.startswith("verifier_"):
            parameter.data = parameter.data.bfloat16().float()
    expected = training_logits(copy.module, inputs)
    with ChangedWeights(rounded_to(torch.bfloat16)):
        seen = training_logits(draft.module, inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    assert leg.passed, leg.reason
    assert 0 < leg.metrics[0].max_rel < 0.05
    assert leg.tolerance is not None and "calibrated" in leg.tolerance.source


def test_nothing_of_a_live_module_changes() -> None:
    draft = in_training(make_draft(2))
    module = draft.module
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    module.fc.weight.grad = torch.ones_like(module.fc.weight)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    flags = {k: (p.requires_grad, id(p)) for k, p in module.named_parameters()}
    modes = {k: m.training for k, m in module.named_modules()}
    random = torch.get_rng_state()
    cast_leg(module, draft.inputs(), torch.bfloat16)
    assert torch.equal(random, torch.get_rng_state())
    state = module.state_dict()
    for name, value in before.items():
        assert torch.equal(value.nan_to_num(7), state[name].nan_to_num(7)), name
    assert flags == {k: (p.requires_grad, id(p)) for k, p in module.named_parameters()}
    assert modes == {k: m.training for k, m in module.named_modules()}
    assert not any(m._forward_hooks for m in module.modules())
    assert torch.equal(module.fc.weight.grad, torch.ones_like(module.fc.weight))
    assert torch.is_grad_enabled()
    optimizer.step()


def test_autocast_does_not_leak_in() -> None:
    draft = make_draft(1)
    plain = training_logits(draft.module, draft.inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = training_logits(draft.module, draft.inputs())
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


def test_rounding_that_overflows_fails() -> None:
    draft = make_draft(1)
    with torch.no_grad():
        draft.module.fc.weight[3, 4] = 1e6
    leg = cast_leg(draft.module, draft.inputs(), "float16")
    assert leg.verdict == "fail"
    assert "fc.weight is not finite as float16" in leg.reason
    assert cast_leg(draft.module, draft.inputs(), "bfloat16").passed


def test_rounding_that_costs_too_much_fails() -> None:
    """float16 loses small weights: more than errors of its unit can explain."""
    draft = make_draft(1)
    with torch.no_grad():
        draft.module.norm.weight *= 1e8
        draft.module.lm_head.weight *= 1e-8
    leg = cast_leg(draft.module, draft.inputs(), torch.float16)
    assert leg.verdict == "fail"
    assert "differ by" in leg.reason


def test_a_wrapped_module_gives_the_same(one_process: None) -> None:
    draft = make_draft(1)
    plain = training_logits(draft.module, draft.inputs())
    wrapped = nn.parallel.DistributedDataParallel(draft.module)
    compiled = torch.compile(wrapped, backend="eager")
    for module in (wrapped, compiled):
        seen = training_logits(module, draft.inputs())
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
        assert cast_leg(module, draft.inputs(), torch.bfloat16).passed


def test_a_compiled_forward_runs_eagerly() -> None:
    draft = make_draft(1)
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _sample: object) -> torch.fx.GraphModule:
        nonlocal compiled
        compiled += 1
        return graph

    plain = training_logits(draft.module, draft.inputs())
    forward = torch.compile(type(draft.module).forward, backend=backend)
    draft.module.forward = forward.__get__(draft.module)
    seen = training_logits(draft.module, draft.inputs())
    assert compiled == 0
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_a_sharded_module_gives_the_same(one_process: None) -> None:
    from torch.distributed.fsdp import fully_shard

    draft = make_draft(2)
    plain = training_logits(draft.module, draft.inputs())
    with ChangedWeights(rounded_to(torch.bfloat16)):
        rounded = training_logits(draft.module, draft.inputs())
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in draft.module.layers:
        fully_shard(layer, mesh=mesh)
    module = fully_shard(draft.module, mesh=mesh)
    seen = training_logits(module, draft.inputs())
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    with ChangedWeights(rounded_to(torch.bfloat16)):
        seen = training_logits(module, draft.inputs())
    assert all(torch.equal(a, b) for a, b in zip(rounded, seen, strict=True))
    leg = cast_leg(module, draft.inputs(), torch.bfloat16, max_seconds=30)
    assert leg.passed, leg.reason


def test_reordered_sums_are_the_same_sums() -> None:
    draft = make_draft(2)
    inputs = draft.inputs()
    plain = training_logits(draft.module, inputs)
    with ReorderedSums():
        other = training_logits(draft.module, inputs)
    apart = max(float((a - b).abs().max()) for a, b in zip(plain, other, strict=True))
    assert 0 < apart < 1e-4


def test_a_short_budget_means_fewer_positions() -> None:
    draft = make_draft(1)
    inputs = draft.inputs(positions=600)
    leg = cast_leg(draft.module, inputs, torch.bfloat16, max_seconds=0.001)
    assert leg.positions == 16
    assert [f.code for f in leg.findings] == ["comparison-reduced"]
    assert "16 of 600 positions" in leg.findings[0].message
    whole = cast_leg(draft.module, draft.inputs(), torch.bfloat16, max_seconds=60)
    assert whole.positions == 40 and whole.findings == ()


def test_recorded_rows_keep_a_document_boundary() -> None:
    rows, width = 30, 12
    batch = {
        "hidden_states": torch.randn(1, 40, width),
        "input_ids": torch.arange(40)[None],
        "document_ids": torch.tensor([[0] * 25 + [1] * 5 + [-1] * 10]),
        "position_ids": torch.cat([torch.arange(1, 26), torch.arange(1, 16)])[None],
    }
    inputs = Inputs.from_batch(batch, positions=12)
    assert len(inputs) == 12
    assert inputs.token_ids.tolist() == list(range(18, 30))
    assert inputs.document_ids.tolist() == [0] * 7 + [1] * 5
    assert torch.equal(inputs.aux, inputs.aux.bfloat16().float())
    one = {**batch, "document_ids": torch.tensor([[0] * rows + [-1] * 10])}
    cut = Inputs.from_batch(one, positions=12)
    assert cut.document_ids.unique().tolist() == [0, 1]
    with pytest.raises(ValueError, match="padding only"):
        Inputs.from_batch({**batch, "document_ids": torch.full((1, 40), -1)})
