"""Recorded rows, sharded modules, and what a comparison leaves behind."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drafts import Draft, make_draft, serving_tensors, write_export
from safetensors.torch import load_file, save_file

from spec_export.judge import (
    Inputs,
    acceptance,
    cast_leg,
    layout_leg,
    load_probe,
    probe_leg,
    training_logits,
)
from spec_export.judge.acceptance import acceptance_length, target_choice
from spec_export.judge.checks import config_of
from spec_export.judge.modes import ChangedWeights, rounded_to
from spec_export.judge.probe import target_ids


def recorded(draft: Draft, tokens: torch.Tensor | None = None, **batch: Any) -> Inputs:
    rows = draft.inputs(positions=48, seed=5)
    return Inputs.from_batch(
        {
            "hidden_states": rows.aux[None],
            "input_ids": (rows.token_ids if tokens is None else tokens)[None],
            "document_ids": rows.document_ids[None],
            **batch,
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
    accepted = leg.acceptance
    assert accepted["training_vs_text"] == accepted["serving_vs_text"] > 1.2
    assert leg.to_json()["acceptance"] == leg.acceptance
    assert probe_leg(folder, load_probe(folder), embed=draft.embed).passed
    random = layout_leg(folder, draft.module, draft.inputs(), embed=draft.embed)
    assert random.passed and random.acceptance is None


def test_a_round_is_verified_by_the_target_s_own_choice() -> None:
    """A token that the target would take and that is not the text's ends what is known.

    Two documents of 6 rows, 3 steps: rounds start at 3 rows of each. The target's
    choice is the text's next token but behind row 1; the draft proposes the target's
    choice always, and then never.
    """
    rows = Inputs.random(vocab_size=9, aux_width=4, positions=12)
    rows = Inputs.from_batch(
        {
            "hidden_states": rows.aux[None],
            "input_ids": torch.arange(12)[None] % 7,
            "document_ids": torch.tensor([[0] * 6 + [1] * 6]),
        },
        positions=12,
    )
    ids, steps = torch.arange(9), 3
    choice = (torch.arange(12) + 1) % 7
    choice[1] = 8

    def proposing(tokens: torch.Tensor) -> list[torch.Tensor]:
        shifted = [tokens.roll(-step) for step in range(steps)]
        return [torch.nn.functional.one_hot(t, 9).float() for t in shifted]

    right = proposing(choice)
    # Accepted is everything; row 1's round is known for one token, row 0's for two.
    assert acceptance_length(right, rows, ids, choice) == 4.0
    # By the text, row 1 proposes a wrong token first, and row 0 one after that.
    assert acceptance_length(right, rows, ids) == pytest.approx(1 + 5 / 6 + 4 / 6 * 2)
    assert acceptance_length(proposing((choice + 1) % 7), rows, ids, choice) == 1.0
    # Wrong second proposals in document 1: of the 5 rounds known up to there, those
    # of rows 0 and 2 go on; then row 2's alone is known, and goes on.
    wrong = [right[0], right[1].clone(), right[2]]
    wrong[1][6:] = wrong[1][6:].roll(1, -1)
    told = acceptance_length(wrong, rows, ids, choice)
    assert told == pytest.approx(1 + 1 + 2 / 5 + 2 / 5)
    unscored = replace(rows, scored=torch.zeros(12, dtype=torch.bool))
    assert acceptance_length(right, unscored, ids, choice) is None


def a_target(folder: Path, **config: Any) -> Path:
    """A folder with what a choice needs."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(96, 32, generator=generator),
            "model.norm.weight": torch.rand(32, generator=generator) * 4 - 1,
            "lm_head.weight": torch.randn(96, 32, generator=generator),
        },
        folder / "model.safetensors",
    )
    about = {"model_type": "llama", "rms_norm_eps": 1e-5, **config}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def test_the_target_s_choice_is_that_of_its_norm_and_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, cpu = make_draft(1), torch.device("cpu")
    last = torch.randn(1, 48, 32, generator=torch.Generator().manual_seed(1))
    rows = recorded(draft, verifier_last_hidden_states=last)
    both = rows.beside(draft.inputs(positions=8))
    folder = a_target(tmp_path / "target")
    about = config_of(folder)
    held = load_file(folder / "model.safetensors")
    norm = torch.nn.RMSNorm(32, eps=1e-5)
    norm.weight.data = held["model.norm.weight"]
    expected = (norm(last[0].bfloat16().float()) @ held["lm_head.weight"].T).argmax(-1)
    found = target_choice(both, folder, about, cpu)
    assert found is not None
    assert torch.equal(found[:48], expected) and set(found[48:].tolist()) == {-1}
    monkeypatch.setattr(acceptance, "_HEAD_ROWS", 7)  # the head in pieces
    again = target_choice(both, folder, about, cpu)
    assert again is not None and torch.equal(again, found)
    gemma = target_choice(both, folder, {**about, "model_type": "gemma3_text"}, cpu)
    assert gemma is not None and not torch.equal(gemma, found)
    assert target_choice(recorded(draft), folder, about, cpu) is None
    assert target_choice(both, None, about, cpu) is None
    save_file({"lm_head.weight": held["lm_head.weight"]}, folder / "model.safetensors")
    assert target_choice(both, folder, about, cpu) is None


def test_rows_of_a_batch_beside_rows_of_a_seed(tmp_path: Path) -> None:
    draft = make_draft(1, norm_output=True)
    text = recorded(draft, loss_mask=torch.ones(1, 48))
    both = text.beside(draft.inputs(positions=40))
    assert (len(both), both.recorded) == (88, 48)
    assert len(both.document_ids.unique()) == 8
    assert "48 rows recorded from a batch of training, 40 from a seed" in (
        both.described()
    )
    fewer = both.first(24)
    assert (len(fewer), fewer.recorded) == (24, 12)
    assert fewer.scored is not None and fewer.scored.sum() == 12
    assert torch.equal(fewer.aux[12:], draft.inputs(positions=12).aux)
    assert set(map(tuple, fewer.aux[:12].tolist())) <= set(
        map(tuple, text.aux.tolist())
    )
    folder = write_export(tmp_path, draft)
    leg = layout_leg(folder, draft.module, both, embed=draft.embed, write_probe=True)
    assert leg.passed and leg.positions == 88
    assert leg.acceptance is not None
    assert set(leg.acceptance) == {"training_vs_text", "serving_vs_text"}
    assert any("verified by that text itself" in note for note in leg.notes)
    again = probe_leg(folder, load_probe(folder), embed=draft.embed)
    assert again.passed and again.positions == 40 and again.acceptance is None


def test_no_text_of_a_training_travels(tmp_path: Path) -> None:
    """Neither its token ids nor its features, of which they could be made again."""
    draft = make_draft(1)
    text = recorded(draft)

    def held(inputs: Inputs) -> set[str]:
        folder = write_export(tmp_path, draft)
        leg = layout_leg(
            folder, draft.module, inputs, embed=draft.embed, write_probe=True
        )
        assert leg.passed
        return set(load_file(folder / "probe/probe.safetensors"))

    travels = {"top_ids", "top_values", "log_sums", "projections", "ranges"}
    assert held(text.beside(draft.inputs(positions=20))) == travels
    # The control: who hands over recorded rows alone wants them stored.
    assert held(text) == travels | {"aux", "token_ids", "position_ids", "document_ids"}


def test_a_fault_that_recorded_features_cannot_show(tmp_path: Path) -> None:
    draft = make_draft(1)
    rows = recorded(draft)
    rows = replace(rows, aux=rows.aux.clone().index_fill(1, torch.arange(64, 96), 0.0))
    tensors = serving_tensors(draft)
    tensors["fc.weight"] = tensors["fc.weight"].clone()
    tensors["fc.weight"][:, 64:] = 0
    folder = write_export(tmp_path, draft, tensors=tensors)
    assert layout_leg(folder, draft.module, rows, embed=draft.embed).passed
    both = rows.beside(draft.inputs(positions=20))
    leg = layout_leg(folder, draft.module, both, embed=draft.embed)
    assert leg.verdict == "fail"


def test_far_positions_are_counted_anew(tmp_path: Path) -> None:
    """In float32 their angles differ by more than the bound of small shapes."""
    draft = make_draft(1)
    rows = recorded(draft, position_ids=torch.arange(30_000, 30_048)[None])
    assert rows.position_ids.max() < 48
    folder = write_export(tmp_path, draft)
    assert layout_leg(folder, draft.module, rows, embed=draft.embed).passed
    far = layout_leg(folder, draft.module, rows.shifted(30_000), embed=draft.embed)
    assert far.verdict == "fail"  # the control


def test_the_stretch_with_most_scored_rows_is_taken() -> None:
    documents = torch.tensor([[0] * 20 + [1] * 20 + [2] * 20 + [-1] * 4])
    mask = torch.zeros(1, 64)
    mask[:, 36:44] = 1
    batch = {
        "hidden_states": torch.randn(1, 64, 6),
        "input_ids": torch.arange(64)[None],
        "document_ids": documents,
        "loss_mask": mask,
        "error_records": 0,
    }
    rows = Inputs.from_batch(batch, positions=10)
    assert rows.token_ids.tolist() == list(range(35, 45))
    assert rows.scored is not None and rows.scored.tolist() == [
        False,
        *[True] * 8,
        False,
    ]
    batch.pop("loss_mask")
    assert Inputs.from_batch(batch, positions=10).token_ids[0] == 15
    one = {**batch, "document_ids": torch.zeros(1, 64, dtype=torch.long)}
    one["loss_mask"] = torch.arange(64)[None] >= 50
    assert Inputs.from_batch(one, positions=10).token_ids[0] == 50


def test_tokens_of_an_mtp_batch_are_one_place_further() -> None:
    """speculators collates x[t] with g[t] there; a row is x[t+1] with g[t]."""
    batch = {
        "hidden_states": torch.arange(8.0)[None, :, None].expand(1, 8, 4),
        "input_ids": torch.arange(8)[None] + 10,
        "document_ids": torch.tensor([[0] * 5 + [1] * 3]),
    }
    rows = Inputs.from_batch(batch, positions=8, kind="mtp")
    assert rows.token_ids.tolist() == [11, 12, 13, 14, 16, 17]
    assert rows.aux[:, 0].tolist() == [0, 1, 2, 3, 5, 6]
    assert rows.document_ids.tolist() == [0] * 4 + [1] * 2
    plain = Inputs.from_batch(batch, positions=8)
    assert plain.token_ids.tolist() == list(range(10, 18))


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
