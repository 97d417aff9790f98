"""Attempts to get a pass for another draft: logits handed over, windows, MTP, Gemma."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafts import make_draft, serving_tensors, write_export
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from spec_export import comparison
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.judge import Inputs, layout_leg
from spec_export.judge.acceptance import target_choice
from spec_export.judge.cast import cast_leg
from spec_export.judge.inputs import Inputs as Rows
from spec_export.judge.modes import SameExperts
from tests.helpers import blocks, mtp
from tests.helpers.cli import spec_export
from tests.helpers.judging import Config, copied, edit, finalized, judged, probed
from tests.judge import test_scaled_embedding as gemma

# --- logits that one leg hands to the other -------------------------------------------


def test_logits_of_another_module_are_no_noise(tmp_path: Path) -> None:
    """Where the bound is measured, a snapshot that went wrong must not raise it."""
    sizes = {"hidden_size": 520}
    draft = make_draft(1, layer=sizes)
    folder = write_export(tmp_path, draft)
    rows = draft.inputs(positions=24)
    edit(folder, lambda c: c.update(sizes))
    first: list[torch.Tensor] = []
    leg = layout_leg(folder, draft.module, rows, embed=draft.embed)
    assert leg.passed and leg.tolerance is not None
    assert leg.tolerance.source.startswith("calibrated")
    with torch.no_grad():
        from spec_export.judge.probe import training_logits

        first = training_logits(draft.module, rows, 3)
    again = layout_leg(folder, draft.module, rows, embed=draft.embed, trained=first)
    assert again.passed, again.reason
    # What was saved is what was copied, and that is not what was trained.
    draft.module.norm.weight.data[3] *= 2
    save_file(serving_tensors(draft), folder / "model.safetensors")
    assert layout_leg(folder, draft.module, rows, embed=draft.embed).passed
    leg = layout_leg(folder, draft.module, rows, embed=draft.embed, trained=first)
    assert leg.verdict == "fail"
    assert leg.tolerance is not None and leg.tolerance.max_rel < 1e-3


def test_logits_of_other_rows_fail(tmp_path: Path) -> None:
    from spec_export.judge.probe import training_logits

    draft = make_draft(1)
    folder = write_export(tmp_path, draft)
    with torch.no_grad():
        other = training_logits(draft.module, draft.inputs(20, seed=4), 3)
    rows = draft.inputs(positions=20)
    leg = layout_leg(folder, draft.module, rows, embed=draft.embed, trained=other)
    assert leg.verdict == "fail"
    short = [step[:7] for step in other]
    with pytest.raises(IndexError):
        layout_leg(folder, draft.module, rows, embed=draft.embed, trained=short)


# --- block drafts ---------------------------------------------------------------------


CHANGES: dict[str, tuple[Config, Callable[[Config], None], str]] = {
    "shorter blocks, no row sees a later one": (
        {"layer": blocks.SLIDING},
        lambda c: c.update(block_size=3),
        "proposes 2 tokens per block, training 3",
    ),
    "longer blocks": (
        {"layer": blocks.SLIDING},
        lambda c: c.update(block_size=6),
        "proposes 5 tokens per block, training 3",
    ),
    "DSpark's shorter blocks": (
        {"kind": "dspark", "layer": blocks.SLIDING},
        lambda c: c.update(block_size=3),
        "proposes 3 tokens per block, training 4",
    ),
    "candidates of the selector": (
        {"kind": "dflash2"},
        lambda c: c["dflash_config"].update(selector_top_k=2),
        "reranks 2 candidates in SGLang, 5 in training",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_how_many_tokens_are_proposed(tmp_path: Path, name: str) -> None:
    """No logit shows it; whoever gets the export has its probe alone."""
    options, change, words = CHANGES[name]
    target = blocks.make_target(tmp_path / "target")
    checkpoint = blocks.make_block_draft(tmp_path / "checkpoint", target, **options)
    out = tmp_path / "out"
    assert finalized(checkpoint, target, out).code == 0
    assert probed(target, out).passed
    edit(out, change)
    leg = probed(target, out)
    assert leg.verdict == "fail" and words in leg.reason
    # A probe that was written before this was recorded says nothing of candidates.
    edit(out, lambda p: p.pop("top_k"), "probe/probe")
    assert probed(target, out).passed is (options.get("kind") == "dflash2")


@pytest.mark.parametrize(
    ("flag", "passes"), [(99, True), (None, False), (50, False), (100, False)]
)
def test_a_window_that_no_row_reaches(
    tmp_path: Path, flag: int | None, passes: bool
) -> None:
    """Windows of real drafts are longer than the documents of a comparison."""
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 100}
    draft = make_draft(1, layer=layer)
    folder, rows = write_export(tmp_path, draft), draft.inputs(40)
    leg = layout_leg(folder, draft.module, rows, embed=draft.embed, window=flag)
    assert leg.passed is passes
    assert passes or "positions back in SGLang, 99 in training" in leg.reason


@pytest.mark.parametrize("flag", [None, 600])
def test_a_window_as_long_as_the_context_is_none(
    tmp_path: Path, flag: int | None
) -> None:
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 512}
    draft = make_draft(1, layer=layer)
    folder, rows = write_export(tmp_path, draft), draft.inputs(20)
    leg = layout_leg(folder, draft.module, rows, embed=draft.embed, window=flag)
    assert leg.passed, leg.reason


# --- MTP ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Checkpoint, target and export of a head with experts."""
    return made_mtp(tmp_path_factory.mktemp("moe"), "qwen3_5_moe_text")


# More than two channels turn, else the base does not matter; no value is a default.
TURNING: Config = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
}


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def turning(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path, Path]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in TURNING.items():
            patch.setitem(mtp.SIZES, key, value)
        made = made_mtp(tmp_path_factory.mktemp("turning"), request.param)
    return (request.param, *made)


def made_mtp(root: Path, kind: str) -> tuple[Path, Path, Path]:
    target = mtp.make_target(root / "target", kind)
    checkpoint = mtp.make_mtp(root / "checkpoint", target, kind)
    # The draft is tried here, whatever the server makes of its target's RoPE.
    allowed = ("--allow", mtp.FIRST_STEP, "--allow", "target-rope-unread")
    ran = finalized(checkpoint, target, root / "out", *allowed)
    assert ran.code == 0, ran.data
    return checkpoint, target, root / "out"


@pytest.mark.parametrize("place", ["a", "z"])
def test_experts_one_by_one_and_in_one_tensor(
    tmp_path: Path, moe: tuple[Path, Path, Path], place: str
) -> None:
    """Which of the two stays depends on the order of the files."""
    checkpoint, target, out = moe
    folder = copied(out, tmp_path / "out")
    rows = 2 * mtp.MOE["moe_intermediate_size"]
    stale = torch.ones(mtp.EXPERTS, rows, mtp.HIDDEN).bfloat16()
    name = "mtp.layers.0.mlp.experts.gate_up_proj"
    save_file({name: stale}, folder / f"{place}.safetensors", {"format": "pt"})
    for leg in (judged(checkpoint, target, folder), probed(target, folder)):
        assert leg.verdict == "fail"
        assert "two tensors of the export set mtp.layers.0.mlp.experts" in leg.reason
    (folder / "spec_export_manifest.json").unlink()
    ran = spec_export("verify", folder, "--target", target)
    assert ran.code == 1 and set(ran.codes("error")) == {"file-contradiction"}


def _drop(key: str) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        del config[key]

    return change


def _set(key: str, value: float) -> Callable[[Config], None]:
    return lambda config: config.update({key: value})


def _newer(key: str, value: float) -> Callable[[Config], None]:
    return lambda config: config["rope_parameters"].update({key: value})


BOTH = {"qwen3_next", "qwen3_5_text"}
# What is done to config.json, and which classes read it.
SPELLINGS: dict[str, tuple[Callable[[Config], None], set[str]]] = {
    "nothing": (lambda config: None, set()),
    "no base beside": (_drop("rope_theta"), {"qwen3_next"}),
    "another base beside": (_set("rope_theta", 1234.0), {"qwen3_next"}),
    "another base in the newer": (_newer("rope_theta", 1234.0), {"qwen3_5_text"}),
    "no share beside": (_drop("partial_rotary_factor"), BOTH),
    "another share beside": (_set("partial_rotary_factor", 0.25), BOTH),
    "another share in the newer": (_newer("partial_rotary_factor", 0.25), set()),
    "no newer": (_drop("rope_parameters"), set()),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_which_spelling_of_rope_is_read(
    tmp_path: Path, turning: tuple[str, Path, Path, Path], name: str
) -> None:
    """SGLang's own classes, not transformers', read a target's configuration."""
    change, readers = SPELLINGS[name]
    kind, checkpoint, target, out = turning
    folder = copied(out, tmp_path / "out")
    edit(folder, change)
    assert judged(checkpoint, target, folder).passed is (kind not in readers)
    assert probed(target, folder).passed is (kind not in readers)


# --- experts of a live module ---------------------------------------------------------


def test_experts_that_rounding_changes_are_said(
    moe: tuple[Path, Path, Path],
) -> None:
    """Both sides take the same ones, so the figures are blind: the note is not."""
    checkpoint, target, _ = moe
    source = CheckpointSource.open(checkpoint)
    lent = comparison.borrowed(source, open_target(target))
    from spec_export.judge import training_module

    module = training_module(
        source.config,
        lambda n: lent[n] if n in lent else comparison.as_torch(source.read(n)),
        [*source.tensors, *lent],
    )
    router = module.get_parameter("mtp_layers.0.mlp.gate.weight")
    router.data = 1 + router.data / 1000  # all of it is lost in bfloat16
    rows = Inputs.for_config(source.config, positions=48)
    leg = cast_leg(module, rows, torch.bfloat16, 2)
    (note,) = [n for n in leg.notes if "other experts" in n]
    assert float(note.split("%")[0]) > 20


def test_same_experts_of_another_number_of_calls() -> None:
    """A second run that routes once more has no choice to follow: no silent reuse."""
    experts, scores = SameExperts(), torch.rand(4, 8)
    with experts.run():
        torch.topk(scores, 2)
    with pytest.raises(IndexError), experts.run():
        torch.topk(scores, 2)
        torch.topk(scores, 2)


# --- acceptance -----------------------------------------------------------------------


def a_gemma3(folder: Path) -> Path:
    torch.manual_seed(4)
    config = Gemma3TextConfig(
        vocab_size=blocks.VOCAB,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [gemma.make_gemma, a_gemma3])
def test_the_target_s_choice_is_its_own(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Gemma's norms are one plus the weight up to the third, and not since."""
    folder = make(tmp_path / "target")
    held = load_file(folder / "model.safetensors")
    norm = held["model.norm.weight"].float()
    norm = torch.exp2(torch.linspace(-2, 2, len(norm)))
    held["model.norm.weight"] = norm.to(held["model.norm.weight"].dtype)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, x: states.append(x[0][0]))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        best = model(tokens).logits[0].argmax(-1)
    rows = Rows(
        tokens[0],
        torch.zeros(40, 3),
        torch.arange(1, 41),
        torch.zeros(40, dtype=torch.long),
        recorded=40,
        last=states[0],
    )
    choice = target_choice(
        rows, folder, open_target(folder).config, torch.device("cpu")
    )
    assert choice is not None and torch.equal(choice, best)
