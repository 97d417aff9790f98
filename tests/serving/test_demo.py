"""The demo's own export, served: from the recipe to the real engine, all by itself.

The recipe of ``make demo`` is trained for one epoch by the real trainer with our
callback, finalized, and served; the simulation uses the checkpoint that speculators
wrote at the same step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spec_export import read_manifest
from tests.serving import simulate
from tests.serving.sglang_process import PYTHON_VARIABLE, Engine
from tests.serving.simulate import NEW_TOKENS, STEPS
from tests.serving.test_engine import served_accept_length

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny_cpu.yaml"


def run(folder: Path, *command: object) -> None:
    """One command of the demo, in its folder."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            PYTHON_VARIABLE: "",  # the test runs the engine itself
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(4, vocabulary, (count, 12), generator=generator)
    return tokens.tolist()


def test_the_demo_is_served_as_it_was_trained(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkpoint names its target by a relative path
    make = REPOSITORY / "recipes" / "make_tiny_target.py"
    run(tmp_path, make, "demo_out", "--rows", 240)
    run(tmp_path, "-m", "spec_export.train", "--config", RECIPE, "--epochs", 1)
    run(tmp_path, "-m", "spec_export.cli", "finalize", "demo_out/exports")
    export = (tmp_path / "demo_out" / "exports" / "latest").resolve()
    manifest = read_manifest(str(export))
    assert manifest.status == "final"
    assert {t.role for t in manifest.tensors.values()} == {
        "trained",
        "frozen",
        "buffer",
    }
    target = tmp_path / "demo_out" / "target"
    checkpoint = tmp_path / "demo_out" / "checkpoints" / "0"
    state = json.loads((checkpoint / "training_state.json").read_text())
    assert state["global_step"] == manifest.training.global_step
    model = simulate.load_target(target)
    prompts = random_prompts(6, 500)
    texts = [simulate.continue_greedily(model, prompt) for prompt in prompts]
    draft = simulate.load_draft(checkpoint)
    expected = simulate.simulate(draft, texts)
    served = engine.serve(target, export, prompts, NEW_TOKENS, STEPS)
    assert [a["output_ids"] for a in served] == [text.new_tokens for text in texts]
    assert [a["histogram"] for a in served] == [r.histogram for r in expected]
    length = served_accept_length(served)
    print(f"acceptance length {length:.3f} over {len(prompts)} prompts")
    assert length > 1.05  # a draft that was never right would have exactly 1
