"""Two processes and a sharded model: a forward is a collective, and nobody is left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.e2e.test_training_export import names, recipe
from tests.helpers.tiny import TORCHRUN, Tiny, launched

RANK = """
import os, sys
import torch
from torch.distributed.tensor import DTensor
from spec_export.training import callback, compare
from spec_export.training.launch import main

broken, arguments = sys.argv[1], sys.argv[2:]
compared = callback.live_cast

def watched(model, config, batch, limit):
    rank = os.environ["RANK"]
    kept = batch.tensors["input_ids"].double().sum().item()
    if broken == rank:
        compared(model, config, batch, limit)
        raise ValueError(f"broken on rank {rank}")
    found = compared(model, config, batch, limit)
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    said = f"{found.leg.verdict}, text {kept:.0f}, sharded {sharded}"
    # In one piece: both ranks write to the same place.
    os.write(2, f"\\nrank {rank}: {said}\\n".encode())
    return found

callback.live_cast = watched
sys.exit(main(arguments))
"""


def trained(
    tiny: Tiny, tmp_path: Path, broken: str, *more: str
) -> subprocess.CompletedProcess[str]:
    path = recipe(tmp_path, tiny)
    content = yaml.safe_load(path.read_text())
    content["callbacks"][0]["init_args"]["compare"] = {"positions": 96}
    path.write_text(yaml.safe_dump(content))
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    return launched(*TORCHRUN, str(script), broken, "--config", str(path), *more)


@pytest.mark.parametrize("shard", [(), ("--fsdp-shard",)], ids=["ddp", "fsdp2"])
def test_rank_0_keeps_the_result(
    tiny: Tiny, tmp_path: Path, shard: tuple[str, ...]
) -> None:
    """All ranks take part in what is a collective, with rank 0's rows."""
    done = trained(tiny, tmp_path, "nobody", "--max-steps", "2", *shard)
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("rank "))
    if shard:
        assert len(said) == 2 and said[0][7:] == said[1][7:]
        assert said[0].endswith("sharded True")  # again
    else:
        assert [line[:7] for line in said] == ["rank 0:"]
    folder = tmp_path / "exports" / "step-00000002"
    legs = json.loads((folder / "spec_export_manifest.json").read_text())["comparison"]
    assert (legs["cast"]["verdict"], legs["layout"]["verdict"]) == ("pass", "pass")
    assert legs["cast"]["positions"] == 96
    assert "48 rows recorded from a batch of training" in str(legs["cast"]["notes"])
    assert legs["layout"]["acceptance"] is not None


@pytest.mark.parametrize("broken", ["0", "1"])
def test_an_error_on_one_rank_leaves_nobody_waiting(
    tiny: Tiny, tmp_path: Path, broken: str
) -> None:
    more = ("--max-steps", "1", "--epochs", "2", "--fsdp-shard")
    done = trained(tiny, tmp_path, broken, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "1" / "training_state.json").is_file()
    if broken == "0":  # whose result it would have been
        assert names(tmp_path) == []
        assert "broken on rank 0" in done.stdout + done.stderr
    else:
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
