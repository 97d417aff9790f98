"""Leg 3 without SGLang: who is asked, what is counted, what a difference means."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from safetensors.torch import load_file, save_file

from spec_export import read_manifest
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.comparison import as_torch, engine_of_export, serving_of
from spec_export.judge import engine_leg, load_probe, training_module
from spec_export.judge.engine import host, rounds
from spec_export.judge.engine import leg as engine
from spec_export.judge.engine.host import EngineFailed, Setup, Sglang
from spec_export.judge.engine.leg import cannot, command, random_prompts, read_answer
from spec_export.judge.engine.rounds import (
    EVIDENCE,
    Flips,
    Served,
    Text,
    closest,
    compare,
    judge,
    nearness,
    walk,
)
from spec_export.judge.engine.side import Side, of_module, of_reference
from spec_export.judge.engine.target import look
from spec_export.judge.parts import open_reference
from spec_export.judge.verdict import Leg, PromptRounds, Tolerance
from spec_export.layout.releases import engine_setup
from spec_export.report.screen import comparison_lines
from tests.helpers import field, mtp
from tests.helpers.cli import spec_export
from tests.helpers.engine_leg import ON_CPU, ON_CUDA, look_once
from tests.serving import drafts, simulate

HERE = Path(sys.executable)
NEWEST = Sglang(HERE, "0.5.23", ("cpu",), plugin=False)
ALLOWED = Tolerance(1e-4, "a test")
SERVING = {
    "min_version": "0.5.17",
    "requires_plugin": False,
    "launch": ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"],
}


# --- the search --------------------------------------------------------------------


def a_text(new: int, prompt: int = 3) -> Text:
    tokens = torch.zeros(prompt + new + 4, dtype=torch.long)
    return Text(prompt, prompt + new, tokens, torch.zeros(1, 1), None, 0.0)


def random_flips(seed: int, text: Text, steps: int) -> Flips:
    """Each draft is right or wrong, the other one at some cost."""
    dice = random.Random(seed)
    right, wrong = [], []
    for _ in range(text.end):
        cost = [dice.choice([1e-6, 1e-3, 0.2, math.inf]) for _ in range(steps)]
        is_right = [dice.random() < 0.5 for _ in range(steps)]
        right.append([0.0 if r else c for r, c in zip(is_right, cost, strict=True)])
        wrong.append(
            [min(c, 1.0) if r else 0.0 for r, c in zip(is_right, cost, strict=True)]
        )
    return Flips(right, wrong)


def all_walks(text: Text, flips: Flips, steps: int) -> dict[tuple[int, ...], float]:
    """Each histogram that some overturning leads to, with the least it takes."""
    found: dict[tuple[int, ...], float] = {}

    def go(newest: int, counts: tuple[int, ...], cost: float) -> None:
        if newest >= text.end - 1:
            found[counts] = min(cost, found.get(counts, math.inf))
            return
        for n in range(steps + 1):
            then = (*counts[:n], counts[n] + 1, *counts[n + 1 :])
            go(newest + n + 1, then, max(cost, flips.cost(newest, n)))

    go(text.prompt, (0,) * (steps + 1), 0.0)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_closest_is_what_trying_everything_finds(seed: int) -> None:
    text, steps = a_text(9), 3
    flips = random_flips(seed, text, steps)
    every = all_walks(text, flips, steps)
    assert len(every) > 10
    for histogram, cost in every.items():
        assert closest(histogram, text, flips) == cost
    assert len({round(c, 9) for c in every.values()}) > 2
    accepted = [flips.expected(at) for at in walk(text, flips)]
    expected = tuple(accepted.count(n) for n in range(steps + 1))
    assert every[expected] == 0


def test_a_histogram_of_another_length_of_text_is_not_explained() -> None:
    text = a_text(9)
    flips = Flips([[0.0] * 3] * text.end, [[1e-9] * 3] * text.end)
    assert closest((0, 0, 0, 2), text, flips) == 0
    assert closest((0, 0, 0, 1), text, flips) == math.inf  # tokens are missing
    assert closest((0, 0, 0, 3), text, flips) == math.inf  # a round too many
    assert closest((8,), text, flips) == 1e-9
    assert closest((0, 0, 0, 0, 2), text, flips) == math.inf  # more than are drafted


def test_nearness() -> None:
    scores = torch.tensor([[0.0, 4.0, 3.0, -4.0]]).repeat(4, 1)
    scores[3, 2] = -math.inf
    ids = torch.tensor([10, 20, 30, 40])
    right, wrong = nearness(scores, ids, torch.tensor([20, 30, 99, 30]))
    assert right.tolist() == [0.0, 1 / 8, math.inf, math.inf]
    assert wrong.tolist() == [1 / 8, 0.0, 0.0, 0.0]


# --- verdicts ----------------------------------------------------------------------


def a_prompt(**changes: Any) -> PromptRounds:
    plain = PromptRounds((4, 2), (4, 2), 0.0, 0.0, True, EVIDENCE, EVIDENCE)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("results", "verdict", "said"),
    [
        ([a_prompt()] * 4, "pass", ""),
        ([a_prompt()] * 3 + [a_prompt(closest=9e-5)], "pass", ""),
        ([a_prompt()] * 3 + [a_prompt(closest=2e-4)], "fail", "on 1 of 4 prompts"),
        ([a_prompt()] * 3 + [a_prompt(closest=math.inf)], "fail", "4+2 rounds"),
        ([a_prompt(closest=math.nan)] * 4, "fail", "on 4 of 4 prompts"),
        # Not blind: an untrained draft of which SGLang accepts one is another draft.
        ([a_prompt(closest=0.5, accepting=0)], "fail", "on 1 of 1"),
        ([a_prompt(accepting=0)] * 4, "not run", "0 accept a draft"),
        ([a_prompt(accepting=2)] * 4, "not run", "8 accept a draft"),
        ([a_prompt(accepting=3)] * 4, "pass", ""),
        ([a_prompt(refusing=2)] * 4, "not run", "8 refuse one"),
        ([a_prompt(counted=False, closest=1.0)] + [a_prompt()] * 3, "pass", ""),
        (
            [a_prompt(counted=False, target_gap=0.3)] * 3 + [a_prompt()],
            "not run",
            "3 of 4",
        ),
    ],
)
def test_verdict(results: list[PromptRounds], verdict: str, said: str) -> None:
    found, reason = judge(results, ALLOWED)
    assert (found, said in reason) == (verdict, True), reason


def test_a_prompt_counts_only_where_target_and_drafts_are_decided() -> None:
    text = a_text(9)
    flips = Flips([[0.0] * 3] * text.end, [[0.2] * 3] * text.end)
    served = Served([0] * 9, [0, 0, 0, 2])
    assert compare(served, text, flips, 1e-4).counted
    assert not compare(served, replace(text, gap=0.01), flips, 1e-4).counted
    assert not compare(served, text, flips, 0.3).counted
    one = compare(Served([0] * 9, [8]), text, flips, 1e-4)
    assert (one.served, one.expected) == ((8, 0, 0, 0), (0, 0, 0, 2))
    assert one.closest == pytest.approx(0.2)
    assert (one.accepting, one.refusing) == (2, 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"histogram": None, "rounds": 3}, "no histogram"),
        ({"histogram": [2, 1], "rounds": 4}, "4 rounds, and 3"),
        ({"histogram": [2, 1], "rounds": None}, "None rounds, and 3"),
    ],
)
def test_answers_that_say_nothing(answer: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        read_answer({"output_ids": [1], **answer})
    good = {"output_ids": [1], "histogram": [2, 1], "rounds": 3}
    assert read_answer(good).histogram == [2, 1]


# --- what can be run ---------------------------------------------------------------


def a_side(**changes: Any) -> Side:
    ids = torch.arange(4)
    plain = Side("x", lambda *_: [], lambda *_: [], 0, ids, [1], None, False, math.inf)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("side", "sglang", "serving", "device", "said"),
    [
        (a_side(mtp=True), NEWEST, SERVING, "cpu", "MTP head"),
        (a_side(layers=None), NEWEST, SERVING, "cpu", "which layers"),
        (a_side(), NEWEST, SERVING, "cuda", "can use cpu in its environment, not cuda"),
        (
            a_side(),
            replace(NEWEST, devices=()),
            SERVING,
            "cpu",
            "neither CUDA nor a CPU",
        ),
        (
            a_side(),
            replace(NEWEST, version="0.5.16.post2"),
            SERVING,
            "cpu",
            "needs 0.5.17",
        ),
        (
            a_side(),
            NEWEST,
            {**SERVING, "requires_plugin": True},
            "cpu",
            "pip install spec-export there",
        ),
        (a_side(window=16.0), NEWEST, SERVING, "cpu", "a window of 16 positions"),
        (
            a_side(),
            replace(NEWEST, version="0.5.11"),
            {**SERVING, "min_version": "0.4.9"},
            "cpu",
            "counts rounds in another way",
        ),
        (a_side(), NEWEST, {}, "cpu", "does not say how it drafts"),
        (a_side(), NEWEST, {"launch": SERVING["launch"][:2]}, "cpu", "does not say"),
    ],
)
def test_why_it_cannot_be_run(
    side: Side, sglang: Sglang, serving: Mapping[str, Any], device: str, said: str
) -> None:
    setup = Setup(**engine_setup(device))
    assert said in (cannot(side, sglang, serving, setup) or "")
    assert cannot(a_side(), NEWEST, SERVING, ON_CPU) is None


def test_releases_are_ordered() -> None:
    versions = ["0.4.9", "0.5.4", "0.5.4.post2", "0.5.9", "0.5.10", "0.5.23+cpu", "0.6"]
    numbers = [host.release_numbers(v) for v in versions]
    assert numbers == sorted(set(numbers))
    assert host.release_numbers("0.5.23rc1") == (0, 5, 23, 0)


def test_the_launch_line_is_what_is_started() -> None:
    launch = ["--speculative-algorithm", "DSPARK", "--x", "{draft}", "--y", "{target}"]
    argv = command(launch, Path("/d"), Path("/t"), ON_CPU)
    assert argv[:2] == ["--model-path", "/t"]
    assert argv[2:8] == [*launch[:3], "/d", "--y", "/t"]
    assert argv[-2:] == ["--speculative-draft-attention-backend", "intel_amx"]
    assert argv[argv.index("--max-running-requests") + 1] == str(engine.PROMPTS)
    assert "cpu" in argv
    assert "cpu" not in command(launch, Path("/d"), Path("/t"), ON_CUDA)
    launch = ["--speculative-algorithm", "EAGLE3"]
    chain = command(launch, Path("/d"), Path("/t"), ON_CPU)
    assert "--speculative-draft-attention-backend" not in chain


def test_prompts_come_from_a_seed_and_avoid_the_ends() -> None:
    prompts = random_prompts(128_000)
    assert prompts == random_prompts(128_000)
    assert [len(p) for p in prompts] == [4, 5, 6, 7, 8, 9, 10, 11]
    ids = [i for p in prompts for i in p]
    assert min(ids) >= 32_000 and max(ids) < 96_000 and len(set(ids)) == len(ids)


# --- processes ---------------------------------------------------------------------


def script(folder: Path, text: str) -> Path:
    (folder / "job_of_a_test.py").write_text(text)
    return folder / "job_of_a_test.py"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no such backend')", "ValueError: no such backend"),
        ("import argparse as a\na.ArgumentParser(prog='p').parse_args(['--x'])", "--x"),
        ("import os\nos.kill(os.getpid(), 9)", "killed, as for want of memory"),
        ("import sys\nsys.exit(3)", "exit status 3 and said nothing"),
        ("import sys\nopen(sys.argv[2], 'w').write('{')", "exit status 0"),
    ],
)
def test_a_process_that_fails_says_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        host.ask(HERE, script(tmp_path, text), {}, tmp_path, 60)


def test_a_process_is_given_its_job_and_variables(tmp_path: Path) -> None:
    text = (
        "import json, os, sys\n"
        "job = json.load(open(sys.argv[1]))\n"
        "said = [job['a'], os.environ['B'], str(sys.path[0])]\n"
        "json.dump(said, open(sys.argv[2], 'w'))\n"
    )
    at = script(tmp_path, text)
    one, other, first = host.ask(HERE, at, {"a": 1}, tmp_path, 60, {"B": "2"})
    assert (one, other) == (1, "2")
    assert first != str(tmp_path)  # a file of ours is no module of theirs


def test_nothing_is_left_of_a_process_that_takes_too_long(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleeps)\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(EngineFailed, match="longer than 2 s"):
        host.ask(HERE, script(tmp_path, text), {}, tmp_path, 2)
    stat = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    for _ in range(50):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("its child is still running")


def test_a_python_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="cannot be run: No such file"):
        host.examine(tmp_path / "python")
    with pytest.raises(EngineFailed, match="PackageNotFoundError"):
        host.examine(HERE)  # no SGLang beside speculators


def test_where_sglang_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host.PYTHON_VARIABLE, raising=False)
    assert host.sglang_python() is None and "not installed here" in host.why_none()
    monkeypatch.setenv(host.PYTHON_VARIABLE, "")
    assert host.sglang_python() is None and "switched off" in host.why_none()
    monkeypatch.setenv(host.PYTHON_VARIABLE, "some/python")
    assert host.sglang_python() == Path.cwd() / "some" / "python"


# --- finalize ----------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return field.make_draft(tmp_path / "E0", field.make_target(tmp_path / "T0"))


def test_finalize_says_why_the_engine_did_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(host.PYTHON_VARIABLE, raising=False)
    ran = spec_export("finalize", checkpoint, "--output", tmp_path / "out")
    assert ran.code == 0 and "comparison-not-run" not in ran.codes()
    leg = read_manifest(str(tmp_path / "out")).comparison["engine"]
    assert (leg.ran, leg.verdict) == (False, "not run")
    assert host.PYTHON_VARIABLE in (leg.reason or "")


def test_a_broken_sglang_is_a_warning_and_costs_no_export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv(host.PYTHON_VARIABLE, str(tmp_path / "private" / "python"))
    for arguments in ((checkpoint, "--output", out), (out,)):
        ran = spec_export("finalize", *arguments)
        assert (ran.code, ran.data["verdict"]) == (0, "pass")
        said = ran.finding("comparison-not-run")
        assert said["severity"] == "warning"
        assert said["subject"] == "comparison.engine"
        assert "cannot be run: No such file" in said["message"]
        leg = read_manifest(str(out)).comparison["engine"]
        assert leg.verdict == "not run" and leg.reason == said["message"]
    assert "private" not in (out / "spec_export_manifest.json").read_text()
    assert spec_export("verify", out).code == 0


def test_without_weights_or_with_quantised_ones_it_is_not_tried(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.delenv(host.PYTHON_VARIABLE, raising=False)
    assert spec_export("finalize", checkpoint, "--output", out).code == 0
    monkeypatch.setenv(host.PYTHON_VARIABLE, str(tmp_path / "python"))
    bare = open_target(field.make_target(tmp_path / "bare", weights=False))
    quantised = open_target(
        field.make_target(tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    )
    for target, said in (
        (None, "--target"),
        (bare, "--target"),
        (quantised, "quantised"),
    ):
        leg = engine_of_export(out, target, "cpu", None)
        assert leg.verdict == "not run" and said in leg.reason
        assert leg.findings == ()


def test_an_mtp_head_is_not_run_and_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = mtp.make_target(tmp_path / "target", "qwen3_next")
    checkpoint = mtp.make_mtp(tmp_path / "mtp", target, "qwen3_next")
    monkeypatch.setenv(host.PYTHON_VARIABLE, "python-of-sglang")
    monkeypatch.setattr(host, "examine", lambda python: NEWEST)
    ran = spec_export(
        *("finalize", checkpoint, "--output", tmp_path / "out"),
        *("--target", target, "--allow", "mtp-first-step"),
    )
    assert ran.code == 0, ran.data
    leg = read_manifest(str(tmp_path / "out")).comparison["engine"]
    assert leg.verdict == "not run" and "after the final norm" in leg.reason
    assert leg.sglang == "0.5.23" and "comparison-not-run" not in ran.codes()


def test_doctor_says_which_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row() -> dict[str, str]:
        ran = spec_export("doctor")
        assert ran.code == 0
        wrong = "comparison-not-run" in ran.codes("warning")
        found = next(c for c in ran.data["checks"] if c["what"] == "engine leg")
        return {**found, "wrong": str(wrong)}

    monkeypatch.delenv(host.PYTHON_VARIABLE, raising=False)
    assert row()["state"] == "not run" and host.PYTHON_VARIABLE in row()["fix"]
    assert row()["wrong"] == "False"
    monkeypatch.setenv(host.PYTHON_VARIABLE, str(tmp_path / "python"))
    assert row()["wrong"] == "True"
    found = Sglang(HERE, "0.5.23", ("cuda", "cpu"), plugin=True)
    monkeypatch.setattr(host, "examine", lambda python: found)
    assert row()["state"] == "SGLang 0.5.23 on cuda or cpu, with our plug-in"


# --- the whole leg, against a simulation of its own ----------------------------------


@dataclass(frozen=True)
class Trained:
    """A draft that is right now and then, its export, and an independent simulation."""

    target: Path
    checkpoint: Path
    export: Path
    texts: list[simulate.Continuation]
    rounds: list[simulate.Rounds]

    def module(self) -> Any:
        source = CheckpointSource.open(self.checkpoint)
        return training_module(
            source.config, lambda name: as_torch(source.read(name)), source.tensors
        )

    def leg(self, side: Side, histograms: list[list[int]], **more: Any) -> Leg:
        """The leg, with these histograms as SGLang's answers."""

        def serve(argv: list[str], prompts: list[list[int]]) -> list[Mapping[str, Any]]:
            assert argv[argv.index("--speculative-num-steps") + 1] == "3"
            assert str(self.export) in argv
            assert prompts == [t.tokens[: t.prompt].tolist() for t in self.texts]
            return [
                {"output_ids": text.new_tokens, "rounds": sum(h), "histogram": h}
                for text, h in zip(self.texts, histograms, strict=True)
            ]

        return engine_leg(
            self.export,
            side,
            NEWEST,
            target=self.target,
            serving=serving_of(self.export),
            setup=ON_CPU,
            vocab_size=drafts.VOCAB,
            serve=serve,
            **more,
        )


@pytest.fixture(autouse=True)
def looked(monkeypatch: pytest.MonkeyPatch) -> None:
    look_once(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    logger.disable("speculators")
    root = tmp_path_factory.mktemp("engine-leg")
    target, checkpoint, export = root / "target", root / "draft", root / "export"
    drafts.make_target(target)
    model = simulate.load_target(target)
    prompts = random_prompts(drafts.VOCAB)
    texts = [simulate.continue_greedily(model, prompt) for prompt in prompts]
    variant = drafts.Variant(2, True, "norm_before_fc", drafts.DRAFT_VOCAB)
    drafts.make_checkpoint(variant, target, texts, checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(host.PYTHON_VARIABLE, "")
        ran = spec_export(
            *("finalize", checkpoint, "--output", export, "--target", target)
        )
    assert ran.code == 0, ran.data
    draft = simulate.load_draft(checkpoint)
    return Trained(target, checkpoint, export, texts, simulate.simulate(draft, texts))


def of_rules(trained: Trained, folder: Path) -> Side:
    """What SGLang's rules make of a folder."""
    target = open_target(trained.target)
    reference = open_reference(
        *(folder, trained.target, None, None, "0.5.23", "cpu", None, torch.float32),
        target.config,
    )
    assert not isinstance(reference, Leg)
    return of_reference(reference, load_probe(folder).layers)


def test_both_sides_expect_what_another_simulation_does(trained: Trained) -> None:
    for side in (of_module(trained.module()), of_rules(trained, trained.export)):
        assert side.layers == drafts.LAYER_IDS
        leg = trained.leg(side, [r.histogram for r in trained.rounds])
        assert leg.verdict == "pass", leg.reason
        assert [list(p.expected) for p in leg.prompts] == [
            [*r.histogram, *[0] * (len(p.expected) - len(r.histogram))]
            for p, r in zip(leg.prompts, trained.rounds, strict=True)
        ]
        assert {p.closest for p in leg.prompts} == {0.0}
        assert max(p.target_gap for p in leg.prompts) == 0.0
        assert leg.acceptance == {
            side: pytest.approx(simulate.accept_length(trained.rounds))
            for side in ("training", "serving")
        }
        assert (leg.device, leg.dtype, leg.steps) == ("cpu", "float32", 3)
        assert leg.sglang == "0.5.23" and leg.findings == ()


def test_features_are_the_inputs_of_the_layers_and_the_last_output(
    trained: Trained,
) -> None:
    model, text = simulate.load_target(trained.target), trained.texts[0]
    _, aux = look(model, text.tokens[None], [0, 5, drafts.LAYERS])
    wanted = torch.cat([text.hidden[0], text.hidden[5], text.last], -1)
    assert torch.equal(aux, wanted)
    normed = model.model.norm(text.last)  # what transformers calls the last state
    assert not torch.allclose(aux[:, -drafts.HIDDEN :], normed, atol=0.1)


def test_other_rounds_are_an_error_that_names_the_leg(trained: Trained) -> None:
    histograms = [r.histogram for r in trained.rounds]
    least = [list(h) for h in histograms]
    least[2][1] -= 1  # one draft less: a round more
    least[2][0] += 2
    leg = trained.leg(of_module(trained.module()), least)
    assert (leg.verdict, "on 1 of 8 prompts" in leg.reason) == ("fail", True)
    (said,) = leg.findings
    assert (said.code, said.subject) == ("comparison-failed", "comparison.engine")
    assert str(said.severity) == "error" and "launch line" in (said.hint or "")
    content = json.loads(json.dumps(leg.to_json()))
    assert content["prompts"][2]["served"] == least[2]
    shown = read_manifest(str(trained.export))
    shown.comparison = {"engine": type(shown.comparison["engine"])(**content)}
    assert (
        "rounds as in training on 7 of 8 random prompts" in comparison_lines(shown)[0]
    )


@pytest.fixture
def answering(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """An SGLang that says what is in the list, and else the right histograms."""
    histograms: list[list[int]] = [list(r.histogram) for r in trained.rounds]

    def starting(*_: Any) -> Any:
        return lambda argv, prompts: [
            {"output_ids": text.new_tokens, "rounds": sum(h), "histogram": h}
            for text, h in zip(trained.texts, histograms, strict=True)
        ]

    monkeypatch.setenv(host.PYTHON_VARIABLE, "python-of-sglang")
    monkeypatch.setattr(host, "examine", lambda python: NEWEST)
    monkeypatch.setattr(engine, "_starting", starting)
    return histograms


def test_finalize_of_a_checkpoint_stands_or_falls_with_the_engine(
    trained: Trained, answering: list[list[int]], tmp_path: Path
) -> None:
    arguments = ("finalize", trained.checkpoint, "--target", trained.target)
    ran = spec_export(*arguments, "--output", tmp_path / "good")
    assert (ran.code, ran.codes("error")) == (0, []), ran.data
    leg = read_manifest(str(tmp_path / "good")).comparison["engine"]
    assert leg.verdict == "pass" and leg.notes == ["expected by speculators' module"]
    answering[3] = [31]
    ran = spec_export(*arguments, "--output", tmp_path / "bad")
    assert (ran.code, ran.codes("error")) == (1, ["comparison-failed"])
    assert ran.finding("comparison-failed")["subject"] == "comparison.engine"
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_an_export_is_finished_in_place_with_the_engine(
    trained: Trained, answering: list[list[int]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.export, out)
    assert spec_export("finalize", out, "--target", trained.target).code == 0
    leg = read_manifest(str(out)).comparison["engine"]
    assert leg.verdict == "pass" and "SGLang's rules" in leg.notes[0]
    before = (out / "spec_export_manifest.json").read_bytes()
    answering[3] = [31]
    ran = spec_export("finalize", out, "--target", trained.target)
    assert (ran.code, ran.codes("error")) == (1, ["comparison-failed"])
    assert (out / "spec_export_manifest.json").read_bytes() == before


def test_an_engine_that_cannot_run_later_leaves_what_was_found(
    trained: Trained,
    answering: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.export, out)
    for python, verdict in (("", "not run"), ("python", "pass"), ("", "pass")):
        monkeypatch.setenv(host.PYTHON_VARIABLE, python)
        assert spec_export("finalize", out, "--target", trained.target).code == 0
        assert read_manifest(str(out)).comparison["engine"].verdict == verdict


def test_a_broken_export_would_have_other_rounds(
    trained: Trained, tmp_path: Path
) -> None:
    """The rounds of a wrong draft, as another one of ours computes them."""
    tensors = load_file(trained.checkpoint / "model.safetensors")
    one, other = (
        f"layers.1.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")
    )
    tensors[one], tensors[other] = tensors[other], tensors[one]
    (tmp_path / "config.json").write_bytes(
        (trained.checkpoint / "config.json").read_bytes()
    )
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    wrong = simulate.simulate(simulate.load_draft(tmp_path), trained.texts)
    leg = trained.leg(of_module(trained.module()), [r.histogram for r in wrong])
    assert leg.verdict == "fail"
    assert sum(p.closest > 1e-2 for p in leg.prompts) >= 2


def test_a_target_that_does_not_run_is_a_warning(
    trained: Trained, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    elsewhere = replace(trained, target=tmp_path)
    leg = elsewhere.leg(
        of_module(trained.module()), [r.histogram for r in trained.rounds]
    )
    assert leg.verdict == "not run"
    assert leg.reason.startswith("the target in transformers: ")
    assert [str(f.severity) for f in leg.findings] == ["warning"]


def test_a_narrow_target_gives_a_measured_tolerance(
    trained: Trained, tmp_path: Path
) -> None:
    """As on CUDA: the target computes in the dtype that it is saved in.

    This target is random, and bfloat16 moves its features so much that no draft is
    decided: that is said. Where it moves them little, a wrong round is found.
    """
    side = of_module(trained.module())
    prompts = [t.tokens[: t.prompt].tolist() for t in trained.texts]
    right = [
        Served(text.new_tokens, r.histogram)
        for text, r in zip(trained.texts, trained.rounds, strict=True)
    ]

    def seen(target: Path, dtype: str) -> tuple[list[Text], str]:
        return engine.look_at_target(
            *(target, prompts, right, side, 3, "cpu", dtype, tmp_path, 300)
        )

    def judged(
        served: list[Served], texts: list[Text], allowed: Tolerance
    ) -> tuple[str, str]:
        flips = [rounds.flips_of(side, text, 3) for text in texts]
        both = zip(served, texts, flips, strict=True)
        return judge([compare(*each, allowed.max_rel) for each in both], allowed)

    texts, dtype = seen(in_bfloat16(trained.target, tmp_path / "narrow"), "auto")
    assert dtype == "bfloat16"
    tolerance = engine._tolerance(side, texts, 3)
    assert tolerance.source.startswith("calibrated: 4 x the noise of")
    assert tolerance.max_rel > 0.1
    verdict, reason = judged(right, texts, tolerance)
    assert (verdict, "8 of 8 prompts are no evidence" in reason) == ("not run", True)

    texts, dtype = seen(trained.target, "float32")
    assert engine._tolerance(side, texts, 3) is engine.EXACT
    same = [replace(text, exact=text.aux) for text in texts]
    least = engine._tolerance(side, same, 3)
    assert least.max_rel == 4 * torch.finfo(torch.bfloat16).eps
    assert judged(right, texts, least) == ("pass", "")
    wrong = [
        replace(one, histogram=[h[0] + 2, h[1] - 1, *h[2:]])
        for one in right
        if (h := one.histogram)
    ]
    assert judged(wrong, texts, least)[0] == "fail"


def in_bfloat16(target: Path, folder: Path) -> Path:
    """The same target, saved in bfloat16."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(target / "model.safetensors")
    narrow = {name: value.bfloat16() for name, value in held.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})
    return folder
