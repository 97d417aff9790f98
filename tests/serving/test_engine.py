"""The real SGLang serves our exports as speculators' own module says it should.

Compared by the number of verification rounds and by the histogram of accepted
drafts, prompt by prompt. Means are a weak test: a wrong layer id or RoPE base can
leave them where they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_export.layout.served_dtype import dtype_flag
from tests.helpers.record import record
from tests.serving import drafts, simulate
from tests.serving.broken import MISTAKES, Config, Tensors, break_export
from tests.serving.conftest import Made
from tests.serving.drafts import SPREAD, VARIANTS, Variant
from tests.serving.sglang_process import Engine
from tests.serving.simulate import (
    NEW_TOKENS,
    STEPS,
    Continuation,
    accept_length,
    same_histograms,
)

Make = Callable[[Variant], Made]

ALL = [
    pytest.param(v, id=v.name, marks=[] if v in SPREAD else pytest.mark.wide)
    for v in VARIANTS
]
# Every mistake can be made in this one.
MISTAKEN = Variant(2, True, "norm_before_fc", drafts.DRAFT_VOCAB)
JUDGED = 1e-5  # largest difference, as a share of the logit range


@pytest.mark.parametrize("variant", ALL)
def test_engine_matches_simulation(
    variant: Variant,
    make: Make,
    engine: Engine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    table: list[tuple[str, ...]],
) -> None:
    made = make(variant)
    served = engine.serve(target, made.export, prompts, NEW_TOKENS, STEPS)
    rounds = [
        answer["rounds"] == len(expected.accepted)
        for answer, expected in zip(served, made.rounds, strict=True)
    ]
    histograms = same_histograms(served, made.rounds)
    table.append(
        (
            variant.name,
            f"{made.judged:.1e}",
            f"{sum(rounds)}/{len(rounds)}",
            f"{sum(histograms)}/{len(histograms)}",
            f"{served_accept_length(served):.3f}",
            f"{accept_length(made.rounds):.3f}",
            f"{accept_length(made.oracle):.3f}",
        )
    )
    record("judge", variant.name, f"{made.judged:.1e}")
    record("engine", variant.name, f"{sum(histograms)}/{len(histograms)}")
    assert made.judged <= JUDGED
    assert [a["output_ids"] for a in served] == [text.new_tokens for text in texts]
    assert all(rounds)
    assert all(histograms)


def served_accept_length(served: list[dict[str, Any]]) -> float:
    """As ``accept_length``.

    SGLang's own mean leaves out what a last round accepted beyond the tokens asked for.
    """
    histograms = [answer["histogram"] for answer in served]
    accepted = sum(n * count for h in histograms for n, count in enumerate(h))
    return 1 + accepted / sum(map(sum, histograms))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_engine_notices(
    mistake: str,
    make: Make,
    engine: Engine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    made = make(MISTAKEN)
    break_export(made.export, tmp_path / "broken", MISTAKES[mistake])
    served = engine.serve(target, tmp_path / "broken", prompts, NEW_TOKENS, STEPS)
    # A wrong draft costs time, never a token: only the rounds can tell.
    assert [a["output_ids"] for a in served] == [text.new_tokens for text in texts]
    same = same_histograms(served, made.rounds)
    print(f"{mistake}: {same.count(False)} of {len(same)} prompts differ")
    assert not all(same)


def test_breaking_changes_nothing_else(
    make: Make,
    engine: Engine,
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    made = make(MISTAKEN)
    break_export(made.export, tmp_path / "copy", lambda tensors, config: None)
    served = engine.serve(target, tmp_path / "copy", prompts, NEW_TOKENS, STEPS)
    assert all(same_histograms(served, made.rounds))


@pytest.mark.parametrize("variant", ALL)
def test_sglang_takes_every_tensor(
    variant: Variant, make: Make, engine: Engine, target: Path
) -> None:
    (report,) = engine.load(target, [make(variant).export])
    assert report["class"] == "LlamaForCausalLMEagle3"
    assert report["ignored"] == []
    assert report["unset"] == not_in_the_export(variant)


def not_in_the_export(variant: Variant) -> list[str]:
    """Parameters that stay unset.

    The target's embedding is put there later, and layers behind the first one hold an
    input_layernorm that they do not use.
    """
    unused = [
        f"model.layers.{i}.input_layernorm.weight" for i in range(1, variant.layers)
    ]
    return ["model.embed_tokens.weight", *unused]


def test_load_report_notices(
    make: Make, engine: Engine, target: Path, tmp_path: Path
) -> None:
    def rename(tensors: Tensors, config: Config) -> None:
        # The name of training where SGLang's has to stand, and one it never heard of.
        tensors["layers.1.input_layernorm.weight"] = tensors.pop(
            "layers.1.hidden_norm.weight"
        )
        tensors["feature_fc.weight"] = tensors.pop("fc.weight")

    break_export(make(MISTAKEN).export, tmp_path / "renamed", rename)
    (report,) = engine.load(target, [tmp_path / "renamed"])
    assert report["ignored"] == ["feature_fc.weight"]
    assert "model.fc.weight" in report["unset"]
    assert "model.layers.1.hidden_norm.weight" in report["unset"]


@pytest.mark.parametrize("variant", ALL)
def test_draft_is_not_saturated(variant: Variant, make: Make) -> None:
    made = make(variant)
    reached, best = accept_length(made.rounds), accept_length(made.oracle)
    assert 1.2 < reached < best - 0.5
    pairs = zip(made.rounds, made.oracle, strict=True)
    assert all(rounds != ideal for rounds, ideal in pairs)


def test_spreading_norms_changes_no_bit(
    target: Path, texts: list[Continuation]
) -> None:
    draft = drafts.new_draft(Variant(2, True, "fc_norm", drafts.VOCAB), target, texts)
    logits = []
    draft.lm_head.register_forward_hook(lambda module, args, out: logits.append(out))
    before = simulate.right_drafts(draft, texts)
    weight = draft.layers[1].input_layernorm.weight.clone()
    drafts.spread_norms(draft)
    assert simulate.right_drafts(draft, texts) == before
    assert not torch.equal(draft.layers[1].input_layernorm.weight, weight)
    assert torch.equal(torch.stack(logits[:STEPS]), torch.stack(logits[STEPS:]))


def test_simulation_counts_what_the_draft_itself_proposes(
    make: Make, texts: list[Continuation]
) -> None:
    draft = simulate.load_draft(make(MISTAKEN).checkpoint)
    counts = simulate.right_drafts(draft, texts)
    for text, right in zip(texts, counts, strict=True):
        for newest in range(text.prompt, text.prompt + 6):
            proposed = simulate.propose(draft, text, newest)
            wanted = text.tokens[newest + 1 : newest + 1 + STEPS].tolist()
            equal = [a == b for a, b in zip(proposed, wanted, strict=True)]
            assert right[newest] == [*equal, False].index(False)


def test_draft_of_another_dtype(
    make: Make, engine: Engine, target: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """By itself the server computes a float32 draft in float16, and stops."""
    half = tmp_path / "target"
    copy_as(torch.bfloat16, target, half)
    made = make(SPREAD[0])
    argv, (found,) = dtype_flag(
        *(json.loads((f / "config.json").read_text()) for f in (made.export, half))
    )
    assert argv == ["--dtype", "bfloat16"] and found.code == "dtype-differs"
    jobs = {"new_tokens": NEW_TOKENS, "steps": STEPS}
    with pytest.raises(pytest.fail.Exception, match="to have the same dtype"):
        engine.serve(half, made.export, prompts, **jobs, dtype="auto")
    served = engine.serve(half, made.export, prompts, **jobs, dtype=argv[1])
    rounded = tmp_path / "draft"
    copy_as(torch.bfloat16, made.export, rounded)
    assert served == engine.serve(half, rounded, prompts, **jobs, dtype="auto")


def copy_as(dtype: torch.dtype, folder: Path, out: Path) -> None:
    """A model folder at another dtype, without a manifest."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
    save_file(cast, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    config |= {"dtype": name, "torch_dtype": name}
    (out / "config.json").write_text(json.dumps(config))
