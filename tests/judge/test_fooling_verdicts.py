"""Attempts to get an undeserved pass: what excuses a failure, what an engine said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_export import comparison
from spec_export.artifact import transforms
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.export import ExportOptions, export_source
from spec_export.findings import SpecExportError
from spec_export.judge import Inputs, Leg
from spec_export.judge.compare import compare_logits
from spec_export.judge.engine import leg as engine
from spec_export.judge.engine.host import Sglang
from spec_export.judge.engine.side import Side, of_reference
from spec_export.judge.parts import open_reference
from spec_export.judge.verdict import Tolerance
from tests.helpers import blocks, mtp
from tests.helpers.cli import spec_export
from tests.helpers.engine_leg import ON_CUDA
from tests.helpers.judging import Config, copied, edit, finalized, probed
from tests.judge import test_scaled_embedding as gemma

# --- what excuses a failure -----------------------------------------------------------


def always_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of the exporter: each expert gets the first one's weights."""
    real = transforms._RULES["take-expert"]
    monkeypatch.setitem(
        transforms._RULES,
        "take-expert",
        lambda s, a, shape, dtype: real(s, {**a, "expert": 0}, shape, dtype),
    )


def test_what_is_always_allowed_excuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each MTP export has this deviation, which the leg does not even see."""
    target = mtp.make_target(tmp_path / "target", "qwen3_next")
    checkpoint = mtp.make_mtp(tmp_path / "checkpoint", target, "qwen3_next")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        always_the_first(patch)
        ran = finalized(checkpoint, target, out, "--allow", mtp.FIRST_STEP)
    assert (ran.code, ran.codes("error")) == (1, ["comparison-failed"])
    assert not out.exists()
    assert finalized(checkpoint, target, out, "--allow", mtp.FIRST_STEP).code == 0
    # Nor does it in a manifest that says so.
    fail = {"verdict": "fail"}
    edit(out, lambda m: m["comparison"]["layout"].update(fail), "spec_export_manifest")
    ran = spec_export("verify", out, "--target", target)
    assert (ran.code, ran.codes("error")) == (1, ["manifest-invalid"])


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("mask-token-is-special", {"pad_token_id": blocks.MASK}),
        ("target-unknown-family", {"architectures": ["AnotherForCausalLM"]}),
    ],
)
def test_what_no_logit_shows_excuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, more: Config
) -> None:
    target = blocks.make_target(tmp_path / "target", **more)
    checkpoint = blocks.make_block_draft(tmp_path / "checkpoint", target)
    right = finalized(checkpoint, target, tmp_path / "right", "--allow", code)
    assert (right.code, right.data["verdict"]) == (0, "pass")
    real = comparison.judge_of_checkpoint

    def with_another_eps(*given: Any) -> Callable[[Path], Mapping[str, Leg]]:
        judge = real(*given)

        def broken(folder: Path) -> Mapping[str, Leg]:
            edit(folder, lambda c: c.update(rms_norm_eps=0.1))
            return judge(folder)

        return broken

    monkeypatch.setattr(comparison, "judge_of_checkpoint", with_another_eps)
    ran = finalized(checkpoint, target, tmp_path / "wrong", "--allow", code)
    assert (ran.code, ran.codes("error")) == (1, ["comparison-failed"])


def test_nothing_excuses_a_cast(tmp_path: Path) -> None:
    """What the saved dtype cannot hold is no matter of the serving class."""
    target = blocks.make_target(tmp_path / "target", pad_token_id=blocks.MASK)
    checkpoint = blocks.make_block_draft(
        tmp_path / "checkpoint", target, layer={**blocks.SLIDING, "sliding_window": 8}
    )
    said = Leg("cast", "fail", "fc.weight is not finite as float16")
    with pytest.raises(SpecExportError) as caught:
        export_source(
            CheckpointSource.open(checkpoint),
            open_target(target),
            ExportOptions(allow=("mask-token-is-special", "sliding-window-extent")),
            tmp_path / "out",
            judge=lambda folder: {"cast": said},
        )
    (found,) = [f for f in caught.value.findings if f.severity == "error"]
    assert (found.code, found.subject) == ("comparison-failed", "cast")


# --- what the engine said -------------------------------------------------------------


def prompt(**more: Any) -> Config:
    return {
        "served": [2, 3],
        "expected": [2, 3],
        "closest": 0.0,
        "target_gap": 0.0,
        "counted": True,
        "accepting": 3,
        "refusing": 2,
        **more,
    }


@pytest.mark.parametrize(
    ("prompts", "code"),
    [
        ([prompt()], 0),
        ([prompt(), prompt(closest=0.4, counted=False)], 0),
        ([prompt(), prompt(closest=0.4)], 1),
        ([prompt(counted=False)], 1),
        ([], 1),
        (None, 1),
        (["a prompt"], 1),
    ],
)
def test_a_verdict_of_the_engine_and_its_numbers(
    tmp_path: Path, finished: tuple[Path, Path], prompts: Any, code: int
) -> None:
    """It has rounds of prompts, where the other legs have logits of steps."""
    folder = copied(finished[0], tmp_path / "export")
    said = {
        "ran": True,
        "verdict": "pass",
        "prompts": prompts,
        "sglang": "0.5.23",
        "tolerance": {"max_rel": 1e-4, "max_kl": 1e-5, "source": "fixed"},
    }
    edit(folder, lambda m: m["comparison"].update(engine=said), "spec_export_manifest")
    ran = spec_export("verify", folder, "--target", finished[1])
    assert (ran.code, ran.codes("error")) == (code, ["manifest-invalid"] * code)


def test_the_engine_is_held_against_what_the_export_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were rounded twice are right, and not those of the checkpoint."""
    monkeypatch.setattr(blocks, "HIDDEN", gemma.ROUGH)
    target = gemma.make_gemma(tmp_path / "target", gemma.ROUGH)
    checkpoint = blocks.make_block_draft(tmp_path / "checkpoint", target)
    sides: list[Side] = []

    def keep(folder: Path, side: Callable[[], Side], *more: Any) -> Leg:
        sides.append(side())
        return Leg("engine", "not run", "a test")

    monkeypatch.setattr(comparison, "_engine", keep)
    out = tmp_path / "out"
    ran = finalized(checkpoint, target, out, "--allow", gemma.ROUNDED)
    assert (ran.code, ran.data["verdict"]) == (0, "pass")
    found = open_reference(
        *(out, target, None, None, "0.5.23", "cpu", None, torch.float32),
        open_target(target).config,
    )
    assert not isinstance(found, Leg)
    served = of_reference(found, [2, 4, 5])
    rows = Inputs.for_config(CheckpointSource.open(checkpoint).config, positions=24)
    for one, other in zip(
        sides[0].scores(rows, 3), served.scores(rows, 3), strict=True
    ):
        assert compare_logits([one], [other])[0].max_rel < engine.EXACT.max_rel


def test_an_engine_that_does_not_speculate_is_no_pass() -> None:
    """The right tokens, and nothing said of drafts: the launch line was not heard."""
    with pytest.raises(engine.EngineFailed, match="no histogram"):
        engine.read_answer({"output_ids": [5] * 32, "rounds": 0, "histogram": []})
    with pytest.raises(engine.EngineFailed, match="no histogram"):
        engine.read_answer({"output_ids": [5], "rounds": None, "histogram": None})
    with pytest.raises(engine.EngineFailed, match="counts 9 rounds, and 4"):
        engine.read_answer({"output_ids": [5], "rounds": 9, "histogram": [1, 3]})


def a_side() -> Side:
    def none(rows: Inputs, steps: int) -> list[torch.Tensor]:
        raise AssertionError("the target is asked first")

    ids, far = torch.arange(8), float("inf")
    return Side("a test", none, none, 0, ids, [1, 2, 3], None, False, far)


@pytest.mark.parametrize(
    ("flags", "found", "asked", "said"),
    [
        ([], "float32", "auto", "SGLang loads in another dtype"),
        (["--dtype", "float16"], "float32", "float16", "SGLang loads in another dtype"),
        (["--dtype", "float16"], "float16", "float16", "that was all"),
    ],
)
def test_sglang_loads_no_float32_target_on_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    found: str,
    asked: str,
    said: str,
) -> None:
    """Rounds of a float16 target are not those of the same in float32."""
    given: list[Any] = []

    def look(*args: Any) -> tuple[list[Any], str]:
        given.append(args[6])
        return [], found

    def stop(*args: Any) -> Tolerance:
        raise engine.EngineFailed("that was all")

    monkeypatch.setattr(engine, "look_at_target", look)
    monkeypatch.setattr(engine, "_tolerance", stop)
    launch = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
    leg = engine.engine_leg(
        tmp_path,
        a_side(),
        Sglang(tmp_path / "python", "0.5.23", ("cuda",), plugin=False),
        target=tmp_path,
        serving={
            "min_version": "0.5.17",
            "requires_plugin": False,
            "launch": [*launch, *flags],
        },
        setup=ON_CUDA,
        vocab_size=64,
        serve=lambda argv, prompts: [],
    )
    assert given == [asked]
    assert leg.verdict == "not run" and said in leg.reason


# --- configuration of the folder ------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1),
        ({"quant_method": "compressed-tensors"}, 1),
        ({"quant_method": "modelopt", "quant_algo": None}, 0),
    ],
)
def test_a_draft_that_says_it_is_quantised(
    tmp_path: Path, finished: tuple[Path, Path], given: Config, code: int
) -> None:
    """SGLang honours it, whatever the weights are."""
    folder = copied(finished[0], tmp_path / "draft")
    edit(folder, lambda c: c.update(quantization_config=given))
    assert probed(finished[1], folder).verdict == "not run"
    (folder / "spec_export_manifest.json").unlink()
    ran = spec_export("verify", folder, "--target", finished[1])
    assert (ran.code, ran.codes("error")) == (code, ["config-invalid"] * code)
