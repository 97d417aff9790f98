"""Leg 3, *engine*: the real SGLang beside the training side, prompt by prompt.

Greedy speculation accepts exactly the drafts that are the target's own next tokens, so
a wrong draft costs rounds and never a token. SGLang is started with the launch line of
the export and continues random prompts; it says how many rounds accepted 0, 1, ...
drafts. The training side is asked the same of the same tokens (``rounds``). Rounds and
histogram of each prompt have to be equal; the mean acceptance is for information.

Equal up to arithmetic. On a CPU all is computed in float32, and a difference of logits
of 1e-4 of their range may be overturned. On CUDA not every kernel of SGLang takes
float32, so it runs in the dtype that is deployed, and what may be overturned is
measured: ``NARROW_FACTOR`` times what the dtype of the target's features moves the
draft's logits by. A prompt of which less than half the rounds are decided beyond that
is no evidence, nor is one of which transformers' target prefers another token by more:
then the target itself is served differently. With too little evidence there is no
verdict.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from spec_export.findings import Finding, warning
from spec_export.judge.compare import NARROW_FACTOR, calibrated, compare_logits
from spec_export.judge.engine.host import (
    PROCESS,
    TARGET,
    EngineFailed,
    Setup,
    Sglang,
    ask,
    release_numbers,
)
from spec_export.judge.engine.rounds import (
    Served,
    Text,
    acceptance,
    compare,
    flips_of,
    judge,
    rows_of,
)
from spec_export.judge.engine.side import Side
from spec_export.judge.parts import findings_of
from spec_export.judge.seeded import uniform
from spec_export.judge.verdict import (
    Leg,
    PromptRounds,
    StepMetrics,
    Tolerance,
    not_run,
)

PROMPTS, NEW_TOKENS = 8, 32
SECONDS = 900.0  # for SGLang, and again for the target
# Two right float32 computations of a small model end within a hundredth of this.
EXACT = Tolerance(1e-4, "fixed: float32 on a CPU")
# The engine runs where leg *layout* has passed.
LOOK = (
    "by SGLang's rules the tensors compute what was trained (leg layout): look at the "
    "launch line, the target and the release of SGLang"
)

ALGORITHM_FLAG, STEPS_FLAG = "--speculative-algorithm", "--speculative-num-steps"
DTYPE_FLAG = "--dtype"

# The command line behind ``launch_server`` and prompts -> what SGLang says of each.
Serve = Callable[[list[str], list[list[int]]], list[Mapping[str, Any]]]


def engine_leg(
    folder: Path,
    side: Side,
    sglang: Sglang,
    *,
    target: Path,
    serving: Mapping[str, Any],
    setup: Setup,
    vocab_size: int,
    seconds: float = SECONDS,
    serve: Serve | None = None,
) -> Leg:
    """Leg 3: rounds and histograms of the real SGLang against what is expected.

    Args:
        folder: The export.
        side: The training side, at the saved dtype.
        sglang: Which SGLang.
        target: Folder of the target, with weights.
        serving: ``serving`` of the manifest: launch, min_version, requires_plugin.
        setup: How SGLang is started, and where.
        vocab_size: Of the target.
        seconds: For SGLang, and again for the target in transformers.
        serve: Asks an SGLang that runs already, instead of starting one.

    Returns:
        The leg. What cannot run is ``not run`` with the reason, and a warning where it
        should have; only other rounds are a failure.
    """
    began = time.monotonic()
    device = setup.device
    if (why := cannot(side, sglang, serving, setup)) is not None:
        return replace(not_run("engine", why), sglang=sglang.version)
    launch: list[str] = list(serving["launch"])
    steps = side.proposed or int(launch[launch.index(STEPS_FLAG) + 1])
    prompts = random_prompts(vocab_size)
    doing = f"SGLang {sglang.version} on {device}"
    with TemporaryDirectory(prefix="spec-export-") as work:
        if serve is None:
            serve = _starting(sglang, setup, Path(work), seconds)
        try:
            argv = command(launch, folder, target, setup)
            served = [read_answer(one) for one in serve(argv, prompts)]
            doing = "the target in transformers"
            texts, dtype = look_at_target(
                *(target, prompts, served, side, steps),
                *(device, _target_dtype(launch, setup), Path(work), seconds),
            )
            if device == "cuda" and dtype == "float32":
                raise EngineFailed(
                    "it is float32, which SGLang loads in another dtype: no two that "
                    "could be compared"
                )
            doing = "the training side"
            tolerance = _tolerance(side, texts, steps)
            results = [
                compare(one, text, flips_of(side, text, steps), tolerance.max_rel)
                for one, text in zip(served, texts, strict=True)
            ]
        except EngineFailed as problem:
            return failed_to_run(f"{doing}: {problem}", sglang.version)
        except torch.OutOfMemoryError:
            return failed_to_run(f"{doing}: out of memory", sglang.version)
    verdict, reason = judge(results, tolerance)
    problems = [reason] if verdict == "fail" else []
    said = () if verdict != "not run" else (_unsettled(reason),)
    return Leg(
        "engine",
        verdict,
        reason,
        device=device,
        dtype=dtype,
        positions=sum(sum(r.served) for r in results if r.counted),
        steps=steps,
        acceptance=acceptance(results),
        tolerance=tolerance,
        notes=(f"expected by {side.what}", *_notes(results)),
        seconds=time.monotonic() - began,
        prompts=tuple(results),
        sglang=sglang.version,
        findings=(*said, *findings_of("engine", problems, [LOOK], 0, 0)),
    )


def failed_to_run(reason: str, version: str | None = None) -> Leg:
    """A leg that should have run: the export is none the worse, and someone is told."""
    leg = not_run("engine", reason)
    return replace(leg, sglang=version, findings=(_unsettled(reason),))


def _unsettled(reason: str) -> Finding:
    return warning("comparison-not-run", "comparison.engine", reason)


def cannot(
    side: Side, sglang: Sglang, serving: Mapping[str, Any], setup: Setup
) -> str | None:
    """Why this SGLang cannot tell anything about this draft; None: it can."""
    known, launch = f"SGLang {sglang.version}", serving.get("launch", ())
    if ALGORITHM_FLAG not in launch or (not side.proposed and STEPS_FLAG not in launch):
        return "the launch line of the export does not say how it drafts"
    if side.mtp:
        return (
            "SGLang gives an MTP head the target's state after the final norm and "
            "training the one before it: their rounds differ by that"
        )
    if side.layers is None:
        return "it is not known which layers' features the draft takes"
    if setup.device not in sglang.devices:
        able = " or ".join(sglang.devices)
        if able:
            return f"{known} can use {able} in its environment, not {setup.device}"
        return (
            f"{known} can use neither CUDA nor a CPU in its environment: "
            "spec-export doctor says what is missing"
        )
    if sglang.release < release_numbers(serving["min_version"]):
        return f"{known} is installed, the export needs {serving['min_version']}"
    if sglang.release < release_numbers(setup.counted_since):
        since = setup.counted_since
        return f"{known} counts rounds in another way than {since} and later"
    if serving["requires_plugin"] and not sglang.plugin:
        return (
            "the export needs our plug-in, which is not in the environment of "
            f"{known}: pip install spec-export there"
        )
    longest = max(_lengths()) + NEW_TOKENS + (side.proposed or 0)
    if side.window < longest:
        return (
            f"a window of {side.window:.0f} positions, which SGLang counts to within "
            f"one position, is shorter than the texts of {longest}"
        )
    return None


def _lengths() -> list[int]:
    return [4 + i % 8 for i in range(PROMPTS)]


def random_prompts(vocab_size: int) -> list[list[int]]:
    """Short prompts from a seed, of the ids in the middle: specials stand at the ends.

    Returns:
        ``PROMPTS`` lists of 4 to 11 ids; the same on every machine.
    """
    low, high = vocab_size // 4, 3 * vocab_size // 4
    prompts = []
    for seed, length in enumerate(_lengths()):
        share = uniform(length, 1000 + seed).double()
        prompts.append((low + share * (high - low)).long().tolist())
    return prompts


def command(
    launch: Sequence[str], folder: Path, target: Path, setup: Setup
) -> list[str]:
    """The launch line of an export, and what keeps the engine small."""
    words = {
        "{draft}": str(folder),
        "{target}": str(target),
        "{prompts}": str(PROMPTS),
    }
    algorithm = launch[launch.index(ALGORITHM_FLAG) + 1]
    more = setup.algorithm_args.get(algorithm, ())
    line = ("--model-path", "{target}", *launch, *setup.args, *more)
    return [words.get(word, word) for word in line]


def _target_dtype(launch: Sequence[str], setup: Setup) -> str:
    """The dtype of the target in transformers: that of SGLang's, where it is told."""
    if setup.device == "cuda" and DTYPE_FLAG in launch:
        return launch[launch.index(DTYPE_FLAG) + 1]
    return setup.target_dtype


def _starting(sglang: Sglang, setup: Setup, work: Path, seconds: float) -> Serve:
    def serve(argv: list[str], prompts: list[list[int]]) -> list[Mapping[str, Any]]:
        job = {
            "do": "serve",
            "argv": argv,
            "prompts": prompts,
            "new_tokens": NEW_TOKENS,
            "counts": dict(setup.counts),
        }
        answer = ask(sglang.python, PROCESS, job, work, seconds, setup.environment)
        found: list[Mapping[str, Any]] = answer["prompts"]
        return found

    return serve


def read_answer(one: Mapping[str, Any]) -> Served:
    """What SGLang says of one request.

    Raises:
        EngineFailed: it counts no rounds, or differently in two places.
    """
    histogram, rounds = one["histogram"], one["rounds"]
    if not histogram:
        raise EngineFailed("it reports no histogram of accepted drafts")
    if rounds != sum(histogram):
        raise EngineFailed(f"it counts {rounds} rounds, and {sum(histogram)} by drafts")
    return Served(one["output_ids"], histogram)


def look_at_target(
    target: Path,
    prompts: Sequence[list[int]],
    served: Sequence[Served],
    side: Side,
    steps: int,
    device: str,
    dtype: str,
    work: Path,
    seconds: float,
) -> tuple[list[Text], str]:
    """What transformers' target says of what SGLang returned, and its dtype.

    Raises:
        EngineFailed: it does not run.
    """
    texts = [p + s.output_ids for p, s in zip(prompts, served, strict=True)]
    output = work / "target.safetensors"
    job = {
        "model": str(target),
        "device": device,
        "dtype": dtype,
        "layers": side.layers,
        "texts": texts,
        "prompts": [len(p) for p in prompts],
        "more": steps,
        "output": str(output),
    }
    answer = ask(Path(sys.executable), TARGET, job, work, seconds)
    held = load_file(output)
    return [
        Text(
            len(prompt),
            len(text),
            held[f"tokens.{i}"],
            held[f"aux.{i}"],
            held.get(f"exact.{i}"),
            float(held[f"gap.{i}"].max()),
        )
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ], str(answer["dtype"])


def _tolerance(side: Side, texts: Sequence[Text], steps: int) -> Tolerance:
    """What arithmetic may overturn: two logits of a draft move."""
    noise: list[StepMetrics] = []
    for text in texts:
        if text.exact is None:
            return EXACT
        rows, at = rows_of(side, text, text.aux)
        exact, _ = rows_of(side, text, text.exact)
        places = torch.arange(len(rows))[at]
        one, other = side.logits(exact, steps), side.logits(rows, steps)
        noise += compare_logits(one, other, places)
    what = "the target's features in its own dtype"
    return calibrated(noise, torch.bfloat16, NARROW_FACTOR, what)


def _notes(results: Sequence[PromptRounds]) -> list[str]:
    notes = []
    left = sum(not r.counted for r in results)
    if left:
        notes.append(f"{left} of {len(results)} prompts are no evidence and left out")
    close = [r.closest for r in results if r.counted and 0 < r.closest < math.inf]
    if close:
        notes.append(
            f"{len(close)} prompts have another histogram, down to drafts whose logits "
            f"are {max(close):.1e} of their range apart"
        )
    return notes
