"""Leg 1 and the training side: a live module is looked at, never touched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drafts import Draft, make_draft
from safetensors.torch import load_file
from torch import nn

from spec_export.judge import (
    Inputs,
    budget,
    cast,
    cast_leg,
    modes,
    training_logits,
    training_module,
)
from spec_export.judge.modes import (
    ChangedWeights,
    ReorderedSums,
    SameExperts,
    jittered,
    rounded_to,
)
from tests.helpers.mtp import make_mtp, make_target


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


def routed(folder: Path) -> Any:
    """An MTP head of three experts, in float32 with weights between bfloat16's."""
    make_target(folder / "target", "qwen3_next")
    make_mtp(folder / "draft", folder / "target", "qwen3_next")
    config = json.loads((folder / "draft" / "config.json").read_text())
    weights = load_file(folder / "draft" / "model.safetensors")
    held = load_file(folder / "target" / "model.safetensors")
    weights["embed_tokens.weight"] = held["model.embed_tokens.weight"]
    weights["lm_head.weight"] = held["lm_head.weight"]
    module = training_module(config, weights.__getitem__, weights)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=generator))
    return module


def test_experts_of_rows_near_a_border_are_the_same_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = routed(tmp_path)
    inputs = Inputs.random(vocab_size=64, aux_width=32, positions=600)
    leg = cast_leg(module, inputs, torch.bfloat16)
    assert leg.passed and leg.tolerance is not None
    assert 0 < max(m.max_rel for m in leg.metrics) < leg.tolerance.max_rel < 0.06
    (note,) = [n for n in leg.notes if "take other experts" in n]
    assert 0 < float(note.split("%")[0]) < 2
    # Weights that are rounded to half as many digits as the saved dtype has.
    coarse = rounded_to(torch.float8_e4m3fn)
    monkeypatch.setattr(cast, "rounded_to", lambda _dtype: coarse)
    assert cast_leg(module, inputs, torch.bfloat16).verdict == "fail"
    # The control: where experts are free, luck decides what is allowed.
    monkeypatch.setattr(cast, "routes", lambda _draft: False)
    free = cast_leg(module, inputs, torch.bfloat16)
    assert free.tolerance is not None
    assert free.tolerance.max_rel > 5 * leg.tolerance.max_rel


def test_experts_are_chosen_again_with_their_own_scores() -> None:
    experts = SameExperts()
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    with experts.run():
        first = torch.topk(scores, 1, dim=-1)
    with experts.run():
        again = torch.topk(scores.flip(0), 1, dim=-1)
    assert torch.equal(first.indices, again.indices)
    assert again.values.flatten().tolist() == pytest.approx([0.1, 0.2])
    assert experts.moved == [1.0]
    with experts.run():
        torch.topk(scores * 2, 1, dim=-1)
    assert experts.moved == [1.0, 0.0]
    assert torch.topk(scores.flip(0), 1, dim=-1).indices.flatten().tolist() == [2, 0]


@pytest.mark.parametrize("shape", [(300, 64), (3, 100, 64), (64,)])
def test_random_errors_are_of_the_size_of_rounding(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    moved = jittered(torch.bfloat16)(value)
    share = ((moved - value) / value).view(-1, 64).double()
    half = torch.finfo(torch.bfloat16).eps / 2
    assert moved.shape == value.shape
    assert float(share.abs().max()) <= half * 1.001
    assert float(share.std()) == pytest.approx(half / 3**0.5, rel=0.2)
    assert abs(float(share.mean())) < half / 4
    assert torch.equal(jittered(torch.bfloat16)(value), moved)
    if len(share) > 1:  # no two rows, nor two columns, go wrong together
        assert float((torch.corrcoef(share[::40]).abs() - torch.eye(8)).max()) < 0.6
        assert float(share.mean(0).abs().max()) < half / 3
        assert float(share.mean(1).abs().max()) < half / 2


@pytest.mark.parametrize("block", [16, 100, 10**9])
def test_weights_in_pieces_are_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    draft = make_draft(2)
    inputs = draft.inputs()
    with ChangedWeights(rounded_to(torch.bfloat16)):
        whole = training_logits(draft.module, inputs)
    monkeypatch.setattr(modes, "_BLOCK", block)
    with ChangedWeights(rounded_to(torch.bfloat16)):
        pieces = training_logits(draft.module, inputs)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_memory_of_a_weight_is_used_again_unless_somebody_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modes, "_BLOCK", 8)
    one, two = (nn.Parameter(torch.randn(6, 4).double()) for _ in range(2))
    twice = [2 * value.detach() for value in (one, two)]
    rows = torch.ones(2, 4, dtype=torch.double)
    expected = [nn.functional.linear(rows, value) for value in twice]
    made: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **more: Any) -> torch.Tensor:
        made.append(1)
        return empty(*args, **more)

    monkeypatch.setattr(modes.torch, "empty", counted)
    with torch.no_grad(), ChangedWeights(lambda w: 2 * w):
        found = [nn.functional.linear(rows, value) for value in (one, two)]
        assert len(made) == 1
        # Views of what was changed, which the next weight must not overwrite.
        view, parts = one[2:], two.chunk(2)
        last = nn.functional.linear(rows, two)
        assert len(made) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(last, expected[1])
    assert torch.equal(view, twice[0][2:]) and torch.equal(parts[1], twice[1][3:])


def test_three_forwards_and_a_look_at_the_clock() -> None:
    draft, rows = make_draft(1), []

    def count(_module: Any, _args: Any, more: dict[str, Any]) -> None:
        rows.append(more["hidden_states"].shape[1])

    handle = draft.module.register_forward_pre_hook(count, with_kwargs=True)
    cast_leg(draft.module, draft.inputs(positions=200), torch.bfloat16)
    assert rows == [200] * 3
    rows.clear()
    inputs = draft.inputs(positions=200)
    cast_leg(draft.module, inputs, torch.bfloat16, max_seconds=60)
    assert rows == [16, 200, 200, 200]
    rows.clear()
    cast_leg(draft.module, inputs, torch.bfloat16, max_seconds=1e-6)
    assert rows == [16, 16, 16, 16]
    handle.remove()


def test_time_that_is_neither_short_nor_ample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that takes 0.1 s and 0.01 s per row: 3 of 200 rows take 6.3 s."""
    now, rows = [0.0], []

    def forward(inputs: Inputs) -> None:
        rows.append(len(inputs))
        now[0] += 0.1 + 0.01 * len(inputs)

    monkeypatch.setattr(budget.time, "perf_counter", lambda: now[0])
    inputs = Inputs.random(vocab_size=9, aux_width=4, positions=200)
    for seconds, taken, looks in (
        (12.0, 200, [16]),
        (8.0, 200, [16, 64]),
        (5.0, None, [16, 64]),
        (0.9, 16, [16]),
    ):
        now[0] = 0.0
        rows.clear()
        found = budget.fitting(inputs, seconds, forward, torch.device("cpu"), full=3)
        assert rows == looks
        assert taken is None or len(found) == taken
        for _ in range(3):
            forward(found)
        assert now[0] <= seconds or len(found) == 16
        assert now[0] > seconds / 2 or len(found) == 200


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
