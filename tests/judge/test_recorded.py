"""Recorded rows, sharded modules, and what a comparison leaves behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drafts import Draft, make_draft, write_export

from spec_export.judge import (
    Inputs,
    cast_leg,
    layout_leg,
    load_probe,
    probe_leg,
    training_logits,
)
from spec_export.judge.acceptance import acceptance_length
from spec_export.judge.modes import ChangedWeights, rounded_to
from spec_export.judge.probe import target_ids


def recorded(draft: Draft, tokens: torch.Tensor | None = None) -> Inputs:
    rows = draft.inputs(positions=48, seed=5)
    return Inputs.from_batch(
        {
            "hidden_states": rows.aux[None],
            "input_ids": (rows.token_ids if tokens is None else tokens)[None],
            "document_ids": rows.document_ids[None],
            "position_ids": rows.position_ids[None],
        },
        positions=48,
    )


def test_acceptance_is_counted_as_a_server_counts() -> None:
    """One token that is the target's, then one that is not: two tokens a round."""
    vocab, steps = 5, 3
    rows = Inputs.random(vocab_size=vocab, aux_width=4, positions=12)
    rows = Inputs.from_batch(
        {
            "hidden_states": rows.aux[None],
            "input_ids": torch.arange(12)[None] % vocab,
            "document_ids": torch.tensor([[0] * 7 + [1] * 5]),
            "position_ids": rows.position_ids[None],
        },
        positions=12,
    )
    ids = torch.arange(vocab)
    right = [
        torch.nn.functional.one_hot((torch.arange(12) + 1 + s) % vocab, vocab).float()
        for s in range(steps)
    ]
    assert acceptance_length(right, rows, ids) == 4.0
    wrong = [right[0], right[1].roll(1, 1), right[2]]
    assert acceptance_length(wrong, rows, ids) == 2.0
    assert acceptance_length([right[0].roll(1, 1)] * 3, rows, ids) == 1.0
    assert acceptance_length(right * 3, rows, ids) is None  # no chain fits


def test_both_sides_accept_alike_on_recorded_rows(tmp_path: Path) -> None:
    draft = make_draft(1, norm_output=True)
    rows = recorded(draft)
    # Tokens that the draft itself proposes now and then: an acceptance to speak of.
    tokens = rows.token_ids.clone()
    for row in range(1, len(tokens)):
        current = recorded(draft, tokens)
        best = training_logits(draft.module, current, 1)[0][row - 1].argmax()
        if row % 4:
            tokens[row] = target_ids(draft.module)[best]
    folder = write_export(tmp_path, draft)
    leg = layout_leg(
        folder,
        draft.module,
        recorded(draft, tokens),
        embed=draft.embed,
        write_probe=True,
    )
    assert leg.passed, leg.reason
    assert leg.acceptance is not None
    assert leg.acceptance["training"] == leg.acceptance["serving"] > 1.2
    assert leg.to_json()["acceptance"] == leg.acceptance
    assert probe_leg(folder, load_probe(folder), embed=draft.embed).passed
    random = layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed)
    assert random.passed and random.acceptance is None


def live_bytes() -> int:
    """Bytes of all tensors that Python knows; storages that several share once."""
    gc.collect()
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu"
    }
    return sum(held.values())


@pytest.mark.parametrize("which", ["cast", "layout", "failed"])
def test_no_tensor_is_left_behind(tmp_path: Path, which: str) -> None:
    draft = make_draft(2)
    inputs = draft.inputs()
    more: dict[str, Any] = {"norm_output": True} if which == "failed" else {}
    folder = write_export(tmp_path, draft, **more)

    def run() -> Any:
        if which == "cast":
            return cast_leg(draft.module, inputs, torch.bfloat16)
        return layout_leg(folder, draft.module, inputs, embed=draft.embed)

    run()  # the first one pays for caches
    before = live_bytes()
    leg = run()
    assert (leg.verdict == "fail") is (which == "failed")
    assert live_bytes() - before < 4096
    held = torch.zeros(10_000)  # the control
    assert live_bytes() - before >= held.nbytes


def _rank(rank: int, folder: str, answer: Callable[[Any], None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    from torch.distributed.fsdp import fully_shard

    draft = make_draft(2)
    inputs = draft.inputs(positions=20)
    plain = training_logits(draft.module, inputs)
    with ChangedWeights(rounded_to(torch.bfloat16)):
        rounded = training_logits(draft.module, inputs)
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in draft.module.layers:
        fully_shard(layer, mesh=mesh)
    module = fully_shard(draft.module, mesh=mesh)
    held = module.fc.weight.to_local().shape[0]
    seen = training_logits(module, inputs)
    with ChangedWeights(rounded_to(torch.bfloat16)):
        seen_rounded = training_logits(module, inputs)
    leg = cast_leg(module, inputs, torch.bfloat16, max_seconds=30)
    answer(
        {
            "plain": all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True)),
            "rounded": all(
                torch.equal(a, b) for a, b in zip(rounded, seen_rounded, strict=True)
            ),
            "moved": not torch.equal(plain[0], rounded[0]),
            "rows held": held,
            "verdict": leg.verdict,
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_of_a_sharded_module(tmp_path: Path) -> None:
    """A forward is a collective: both ranks take part and both see the whole."""
    context = torch.multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, str(tmp_path), answers.put))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    for _ in ranks:
        assert answers.get() == {
            "plain": True,
            "rounded": True,
            "moved": True,
            "rows held": 16,
            "verdict": "pass",
        }
