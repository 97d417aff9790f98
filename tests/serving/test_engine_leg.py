"""Leg 3 of ``finalize``: the real SGLang, against a simulation of the tests' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spec_export import read_manifest
from spec_export.artifact.source import CheckpointSource
from spec_export.comparison import as_torch, serving_of
from spec_export.judge import engine_leg, training_module
from spec_export.judge.engine import host
from spec_export.judge.engine.leg import command, random_prompts
from spec_export.judge.engine.side import Side, of_module
from spec_export.judge.verdict import Leg
from tests.helpers.cli import spec_export
from tests.helpers.engine_leg import ON_CPU, look_once
from tests.serving import blocks, drafts, plugin_drafts, simulate
from tests.serving.blocks import BlockVariant
from tests.serving.broken import MISTAKES, break_export
from tests.serving.conftest import export_draft
from tests.serving.drafts import VOCAB, Variant
from tests.serving.sglang_process import (
    PYTHON_VARIABLE,
    Engine,
    sglang_environment,
    sglang_python,
)
from tests.serving.simulate import NEW_TOKENS, STEPS, Continuation

STOCK = Variant(2, True, "norm_before_fc", drafts.DRAFT_VOCAB)
BLOCKS = {variant.name: variant for variant in blocks.VARIANTS}
NAMES = [
    "stock",
    *(
        pytest.param(name, marks=pytest.mark.wide)
        for name in ("plug-in", "dflash-mixed", "dflash2", "dspark-vanilla-reduced")
    ),
]
EVER = {"norms-swapped"}  # a minute each


@dataclass(frozen=True)
class Draft:
    """A checkpoint whose draft is right now and then behind the prompts of the leg."""

    checkpoint: Path
    rounds: list[simulate.Rounds]

    def side(self) -> Side:
        source = CheckpointSource.open(self.checkpoint)
        module = training_module(
            source.config, lambda name: as_torch(source.read(name)), source.tensors
        )
        return of_module(module)


@pytest.fixture(scope="session")
def own_texts(target: Path) -> list[Continuation]:
    """The prompts of the leg with the target's continuations."""
    model = simulate.load_target(target)
    return [simulate.continue_greedily(model, p) for p in random_prompts(VOCAB)]


@pytest.fixture(scope="session")
def own_draft(
    target: Path,
    own_texts: list[Continuation],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Draft]:
    root = tmp_path_factory.mktemp("engine-leg")

    @cache
    def made(name: str) -> Draft:
        variant: Variant | BlockVariant = {
            "stock": STOCK,
            "plug-in": plugin_drafts.EACH[0],
        }.get(name) or BLOCKS[name]
        checkpoint = root / name
        if isinstance(variant, BlockVariant):
            blocks.make_checkpoint(variant, target, own_texts, checkpoint)
            draft = blocks.load_draft(checkpoint, variant.kind)
            return Draft(checkpoint, blocks.rounds(draft, own_texts))
        drafts.make_checkpoint(variant, target, own_texts, checkpoint)
        draft = simulate.load_draft(checkpoint)
        return Draft(checkpoint, simulate.simulate(draft, own_texts))

    return made


@pytest.fixture(scope="session")
def own_export(
    own_draft: Callable[[str], Draft],
    target: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The export of the stock draft; the engine is left to the tests."""
    out = tmp_path_factory.mktemp("engine-leg-export") / "stock"
    export_draft(own_draft("stock").checkpoint, out, target)
    return out


def leg_of(
    engine: Engine, target: Path, draft: Draft, folder: Path, export: Path
) -> Leg:
    """The leg of a folder, by an engine that runs already."""

    def serve(argv: list[str], prompts: list[list[int]]) -> list[Mapping[str, Any]]:
        answers: list[Mapping[str, Any]] = []
        answers += engine.serve(target, folder, prompts, NEW_TOKENS, STEPS)
        return answers

    return engine_leg(
        folder,
        draft.side(),
        host.Sglang(sglang_python(), engine.version, ("cpu",), plugin=False),
        target=target,
        serving=serving_of(export),
        setup=ON_CPU,
        vocab_size=VOCAB,
        serve=serve,
    )


@pytest.mark.parametrize("name", NAMES)
def test_finalize_runs_sglang(
    name: str,
    own_draft: Callable[[str], Draft],
    engine: Engine,
    target: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft, out = own_draft(name), tmp_path / "out"
    variables = sglang_environment()
    if name == "plug-in":
        variables |= request.getfixturevalue("installed")
    if name in BLOCKS:
        variables["SPEC_EXPORT_BLOCK_DRAFTS"] = "1"
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv(PYTHON_VARIABLE, str(sglang_python()))
    ran = spec_export(
        *("finalize", draft.checkpoint, "--output", out, "--target", target)
    )
    assert ran.code == 0, ran.data
    assert "comparison-not-run" not in ran.codes()
    leg = read_manifest(str(out)).comparison["engine"]
    assert (leg.verdict, leg.device, leg.dtype) == ("pass", "cpu", "float32"), leg
    assert leg.sglang == engine.version
    for prompt, rounds in zip(leg.prompts, draft.rounds, strict=True):
        size = len(prompt["served"])
        histogram = [*rounds.histogram, *[0] * (size - len(rounds.histogram))]
        assert prompt["served"] == prompt["expected"] == histogram
        assert prompt["closest"] == prompt["target_gap"] == 0
    accepted = simulate.accept_length(draft.rounds)
    assert leg.acceptance["serving"] == pytest.approx(accepted)
    assert f"engine: pass (SGLang {leg.sglang})" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(name, marks=[] if name in EVER else pytest.mark.wide)
        for name in MISTAKES
    ],
)
def test_other_rounds_fail_the_leg(
    mistake: str,
    own_draft: Callable[[str], Draft],
    own_export: Path,
    engine: Engine,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_once(monkeypatch)
    break_export(own_export, tmp_path / "broken", MISTAKES[mistake])
    draft = own_draft("stock")
    leg = leg_of(engine, target, draft, tmp_path / "broken", own_export)
    print(mistake, [p.closest for p in leg.prompts], leg.acceptance)
    assert leg.verdict == "fail", leg.reason
    assert [f.code for f in leg.findings] == ["comparison-failed"]


def test_what_is_not_broken_passes(
    own_draft: Callable[[str], Draft],
    own_export: Path,
    engine: Engine,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_once(monkeypatch)
    break_export(own_export, tmp_path / "copy", lambda tensors, config: None)
    draft = own_draft("stock")
    leg = leg_of(engine, target, draft, tmp_path / "copy", own_export)
    assert (leg.verdict, leg.findings) == ("pass", ())


def test_a_launch_line_that_sglang_refuses_is_a_warning(
    own_draft: Callable[[str], Draft],
    own_export: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in sglang_environment().items():
        monkeypatch.setenv(key, value)
    serving = serving_of(own_export)
    serving["launch"] = [*serving["launch"], "--no-such-flag-of-sglang"]
    sglang = host.examine(sglang_python())
    assert sglang.devices == ("cpu",) and not sglang.plugin
    leg = engine_leg(
        own_export,
        own_draft("stock").side(),
        sglang,
        target=target,
        serving=serving,
        setup=ON_CPU,
        vocab_size=VOCAB,
    )
    assert leg.verdict == "not run"
    assert "--no-such-flag-of-sglang" in leg.reason
    assert [str(f.severity) for f in leg.findings] == ["warning"]
    argv = command(serving["launch"], own_export, target, ON_CPU)
    assert "--no-such-flag-of-sglang" in argv
