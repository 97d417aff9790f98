"""The real engine as a judge of an export that is right.

Of a Gemma-4 whose layers have windows, and whose scale is no power of two: weights are
rounded twice, which ``tests/judge/test_fooling_verdicts.py`` holds against both sides.
What the leg says has to be believed by ``verify``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from loguru import logger

from spec_export import read_manifest
from spec_export.judge.engine.leg import random_prompts
from tests.helpers.cli import spec_export
from tests.serving import blocks, drafts, simulate
from tests.serving.sglang_process import (
    PYTHON_VARIABLE,
    sglang_environment,
    sglang_python,
)
from tests.serving.test_scaled_embedding import BY_NAME, make_gemma

ROUGH = 96  # its root is no power of two


def test_a_scaled_target_with_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger.disable("speculators")
    monkeypatch.setattr(drafts, "HIDDEN", ROUGH)
    target = make_gemma(tmp_path / "target")
    model = simulate.load_target(target)
    texts = [
        simulate.continue_greedily(model, prompt)
        for prompt in random_prompts(drafts.VOCAB)
    ]
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    blocks.make_checkpoint(BY_NAME["dflash"], target, texts, checkpoint)
    more = {"SPEC_EXPORT_BLOCK_DRAFTS": "1", PYTHON_VARIABLE: str(sglang_python())}
    for key, value in {**sglang_environment(), **more}.items():
        monkeypatch.setenv(key, value)
    ran = spec_export(
        *("finalize", checkpoint, "--target", target, "--output", out),
        *("--dtype", "bfloat16", "--allow", "embedding-scale-rounded"),
    )
    assert ran.code == 0, ran.data
    leg = read_manifest(str(out)).comparison["engine"]
    assert leg.verdict == "pass", leg.reason
    assert [p["closest"] for p in leg.prompts] == [0] * len(texts)
    assert spec_export("verify", out, "--target", target).code == 0
