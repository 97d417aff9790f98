"""The real SGLang serves block drafts as speculators' own modules say it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.record import record
from tests.serving import blocks, simulate
from tests.serving.blocks import SPREAD, VARIANTS, BlockVariant
from tests.serving.broken import Config, Tensors, break_export
from tests.serving.conftest import export_draft
from tests.serving.sglang_process import Engine
from tests.serving.simulate import (
    NEW_TOKENS,
    STEPS,
    Continuation,
    accept_length,
    same_histograms,
)

JUDGED = 1e-5
BY_NAME = {variant.name: variant for variant in VARIANTS}
ALL = [
    pytest.param(v, id=v.name, marks=[] if v.name in SPREAD else pytest.mark.wide)
    for v in VARIANTS
]


@dataclass(frozen=True)
class Made:
    """A variant's export, and what it should do in a server."""

    export: Path
    rounds: list[simulate.Rounds]

    @property
    def manifest(self) -> dict[str, Any]:
        """What the exporter says about it."""
        return json.loads((self.export / "spec_export_manifest.json").read_text())


Make = Callable[[BlockVariant], Made]


@pytest.fixture(scope="session")
def make(
    target: Path,
    texts: list[Continuation],
    tmp_path_factory: pytest.TempPathFactory,
) -> Make:
    """Trains, exports and simulates a variant, once per session."""
    root = tmp_path_factory.mktemp("blocks")

    @cache
    def made(variant: BlockVariant) -> Made:
        checkpoint, export = root / variant.name, root / f"{variant.name}-export"
        blocks.make_checkpoint(variant, target, texts, checkpoint)
        export_draft(checkpoint, export, target)
        draft = blocks.load_draft(checkpoint, variant.kind)
        return Made(export, blocks.rounds(draft, texts))

    return made


def serve(
    engine: Engine, target: Path, export: Path, algorithm: str, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """The block size comes from the draft's config.json, as on a deployer's line."""
    flags = blocks.arguments(algorithm)
    return engine.serve(target, export, prompts, NEW_TOKENS, STEPS, **flags)


@pytest.mark.parametrize("variant", ALL)
def test_engine_matches_simulation(
    variant: BlockVariant,
    make: Make,
    block_engine: Engine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
) -> None:
    made = make(variant)
    serving, layout = made.manifest["serving"], made.manifest["comparison"]["layout"]
    assert serving["algorithm"] == variant.algorithm
    assert max(m["max_rel"] for m in layout["metrics"]) <= JUDGED
    served = serve(block_engine, target, made.export, variant.algorithm, prompts)
    equal = same_histograms(served, made.rounds)
    accepted = accept_length(made.rounds)
    record("engine", variant.name, f"{sum(equal)}/{len(equal)}")
    print(f"{variant.name}: {sum(equal)}/{len(equal)} equal, accept {accepted:.3f}")
    assert [a["output_ids"] for a in served] == [text.new_tokens for text in texts]
    assert all(equal)
    assert [a["rounds"] for a in served] == [len(r.accepted) for r in made.rounds]


def _ids_not_shifted(tensors: Tensors, config: Config) -> None:
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [k + 1 for k in ids]


def _other_slot(tensors: Tensors, config: Config) -> None:
    config["sample_from_anchor"] = not config["sample_from_anchor"]


def _bidirectional(tensors: Tensors, config: Config) -> None:
    config["is_causal"] = False


def _whole_vocabulary(tensors: Tensors, config: Config) -> None:
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name] * 0


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param("dflash-mixed", _ids_not_shifted, id="ids not shifted"),
        pytest.param("dflash-mixed", _bidirectional, id="is_causal false"),
        pytest.param("dflash-reduced", _whole_vocabulary, id="vocabulary not reduced"),
        pytest.param(
            "dspark-gated-reduced-no-anchor", _other_slot, id="sample_from_anchor"
        ),
    ],
)
def test_engine_notices(
    name: str,
    mistake: Callable[[Tensors, Config], None],
    make: Make,
    block_engine: Engine,
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    variant = BY_NAME[name]
    made = make(variant)
    break_export(made.export, tmp_path / "broken", mistake)
    served = serve(
        block_engine, target, tmp_path / "broken", variant.algorithm, prompts
    )
    equal = same_histograms(served, made.rounds)
    print(f"{len(equal) - sum(equal)} of {len(equal)} prompts differ")
    assert not all(equal)


@pytest.mark.parametrize("variant", ALL)
def test_sglang_takes_every_tensor(
    variant: BlockVariant, make: Make, block_engine: Engine, target: Path
) -> None:
    made = make(variant)
    job = {
        "do": "load",
        "target": str(target),
        "drafts": [str(made.export)],
        "extra": blocks.arguments(variant.algorithm),
    }
    (report,) = block_engine._ask(job)["reports"].values()
    assert report["class"] == made.manifest["serving"]["architecture"]
    assert report["unset"] == []
    # The confidence head exists with SGLANG_RAGGED_VERIFY_MODE only.
    assert all(name.startswith("confidence_head.") for name in report["ignored"])
