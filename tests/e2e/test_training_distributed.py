"""Two processes on the CPU: DDP and FSDP2 export what one process would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
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


WATCHED = """
import sys
import torch.distributed as dist
from speculators.train import checkpointer
from spec_export.training import callback, snapshot
from spec_export.training.launch import main

counts = {"gathered": 0}
gather = checkpointer.get_model_state_dict

def counted(*args, **more):
    counts["gathered"] += 1
    return gather(*args, **more)

checkpointer.get_model_state_dict = counted
snapshot.get_model_state_dict = counted
if sys.argv[1] == "break":
    write = callback.write_export
    def broken(*args):
        raise OSError(5, "Input/output error")
    callback.write_export = broken
code = main(sys.argv[2:])
print(f"gathered {counts['gathered']}", file=sys.stderr)
sys.exit(code)
"""


def watched(
    tmp_path: Path, how: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return subprocess.run(
        [*launcher, "--nproc-per-node=2", str(script), how, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_sharded_model_is_gathered_once_for_both(tiny: Tiny, tmp_path: Path) -> None:
    """Once before the first step, then once for the save and its export together."""
    path = recipe(tmp_path, tiny)
    more = ("--max-steps", "1", "--epochs", "2", "--fsdp-shard")
    done = watched(tmp_path, "count", "--config", str(path), *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert done.stderr.count("gathered 3") == 2, done.stderr[-1000:]


@pytest.mark.parametrize(
    ("shard", "on_error"),
    [((), "warn"), (("--fsdp-shard",), "raise")],
    ids=["ddp-warn", "fsdp2-raise"],
)
def test_an_error_on_rank_0_reaches_all_and_hangs_none(
    tiny: Tiny, tmp_path: Path, shard: tuple[str, ...], on_error: str
) -> None:
    path = recipe(tmp_path, tiny)
    content = yaml.safe_load(path.read_text())
    content["callbacks"][0]["init_args"]["on_error"] = on_error
    path.write_text(yaml.safe_dump(content))
    more = ("--max-steps", "1", "--epochs", "2", *shard)
    done = watched(tmp_path, "break", "--config", str(path), *more)
    assert names(tmp_path) == []
    if on_error == "warn":
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("gathered") == 2
        assert (tmp_path / "run" / "1" / "training_state.json").is_file()
    else:
        assert done.returncode != 0
        assert "rank 0: OSError" in done.stderr  # what the other rank says
        assert not (tmp_path / "run" / "1" / "val_metrics.json").is_file()
