"""Two processes on the CPU: DDP and FSDP2 export what one process would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.test_training_export import names, recipe
from tests.helpers.tiny import REPOSITORY, Tiny


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return subprocess.run(
        [*launcher, "--nproc-per-node=2", "-m", "spec_export.train", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("shard", [(), ("--fsdp-shard",)], ids=["ddp", "fsdp2"])
def test_rank_0_exports_the_whole_model(
    tiny: Tiny, tmp_path: Path, shard: tuple[str, ...]
) -> None:
    path = recipe(tmp_path, tiny)
    done = torchrun("--config", str(path), "--max-steps", "2", *shard)
    assert done.returncode == 0, done.stderr[-3000:]
    assert names(tmp_path) == ["step-00000002"]
    folder = tmp_path / "exports" / "step-00000002"
    exported = load_file(folder / "model.safetensors")
    trained = load_file(tmp_path / "run" / "0" / "model.safetensors")
    for name in ("fc.weight", "norm.weight", "lm_head.weight", "d2t"):
        assert exported[name].tobytes() == trained[name].tobytes()
    manifest = json.loads((folder / "spec_export_manifest.json").read_text())
    assert manifest["tensors"]["fc.weight"]["role"] == "trained"
    assert manifest["tensors"]["lm_head.weight"]["role"] == "frozen"
    # Only the first process talks.
    assert done.stderr.count("spec-export: no accelerator") == 1
