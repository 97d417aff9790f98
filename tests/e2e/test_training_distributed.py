"""Two processes on the CPU: DDP and FSDP2 export what one process would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file

from spec_export.findings import Severity
from spec_export.training.launchers import join_launcher
from tests.e2e.held_weights import CHANGED, KINDS, held
from tests.e2e.test_training_export import names, recipe
from tests.helpers.tiny import TORCHRUN, Tiny, launched

ACCELERATE = (
    *("accelerate.commands.launch", "--num_processes=2", "--num_machines=1"),
    *("--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"),
)
# Started by mpirun, which is not needed on the machine: it starts and tells as much.
MPIRUN = """#!/bin/bash
if [[ $1 == --version ]]; then echo "mpirun (Open MPI)"; exit; fi
while [[ $1 == -* ]]; do
  if [[ $1 == -n ]]; then count=$2; fi
  shift 2
done
export OMPI_COMM_WORLD_SIZE=$count
for ((rank = 0; rank < count; rank++)); do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" &
  started+=($!)
done
for process in "${started[@]}"; do wait "$process" || code=$?; done
exit "${code:-0}"
"""


def require_whole(tmp_path: Path, step: int, save: str) -> None:
    """The export is what the trainer's own checkpoint of the same weights holds."""
    folder = tmp_path / "exports" / f"step-{step:08d}"
    exported = load_file(folder / "model.safetensors")
    trained = load_file(tmp_path / "run" / save / "model.safetensors")
    for name in ("fc.weight", "norm.weight", "lm_head.weight", "d2t"):
        assert exported[name].tobytes() == trained[name].tobytes()
    manifest = json.loads((folder / "spec_export_manifest.json").read_text())
    assert manifest["tensors"]["fc.weight"]["role"] == "trained"
    assert manifest["tensors"]["lm_head.weight"]["role"] == "frozen"


@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, (*ACCELERATE, "--multi_gpu")],
    ids=["torchrun", "accelerate"],
)
def test_rank_0_exports_the_whole_model(
    tiny: Tiny, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    flags = ("--config", str(recipe(tmp_path, tiny)), "--max-steps", "2")
    done = launched(*launcher, "-m", "spec_export.train", *flags)
    require_two(tmp_path, done)


def require_two(tmp_path: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Two processes have trained one draft for two steps, and exported it."""
    assert done.returncode == 0, done.stderr[-3000:]
    assert names(tmp_path) == ["step-00000002"]
    require_whole(tmp_path, 2, "0")
    # Only the first process talks.
    assert done.stderr.count("spec-export: no accelerator") == 1
    assert "option-invalid" not in done.stderr
    assert "# World size: 2" in (tmp_path / "run" / "train_command.txt").read_text()


JOIN = """
import os
import sys
from spec_export.findings import SpecExportError
from spec_export.training.launchers import join_launcher

try:
    join_launcher(os.environ, sharded=False)
except SpecExportError as problem:
    sys.exit(str(problem))
import torch.distributed as dist
dist.init_process_group("gloo")
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, os.environ["LOCAL_RANK"])
sys.stdout.write(f"here are {' '.join(everybody)}\\n")  # in one piece
dist.barrier()
dist.destroy_process_group()  # its threads do not survive the interpreter
"""


def test_accelerate_on_cpus_starts_one_process_or_mpi(tmp_path: Path) -> None:
    """Several by MPI find each other; one in the place of several is refused."""
    script, mpirun, hosts = (tmp_path / n for n in ("join.py", "mpirun", "hosts"))
    script.write_text(JOIN)
    mpirun.write_text(MPIRUN)
    mpirun.chmod(0o755)
    hosts.write_text("localhost\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"--main_process_port={free.getsockname()[1]}"
    cpus = (*ACCELERATE, place, "--cpu")
    path = f"{tmp_path}:{os.environ['PATH']}"
    both = launched(*cpus, f"--mpirun_hostfile={hosts}", str(script), PATH=path)
    assert both.returncode == 0, both.stderr[-3000:]
    assert both.stdout.count("here are 0 1") == 2

    one = launched(*cpus, str(script))
    assert one.returncode != 0
    assert "asked for several processes and has started one" in one.stderr


PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "joins"),
    [
        ({}, False),
        ({"ACCELERATE_USE_CPU": "True"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}, False),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", **PLACE}, True),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, False),  # srun does not say which here
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "LOCAL_RANK": "0"}, False),
    ],
)
def test_whom_a_process_takes_itself_for(environ: dict[str, str], joins: bool) -> None:
    before = dict(environ)
    assert join_launcher(environ, sharded=False) == []
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert environ == (before | ranks if joins else before)


def test_a_wrapper_of_accelerate_is_not_taken_for_sharding() -> None:
    environ = {"LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true"}
    (told,) = join_launcher(environ, sharded=False)
    assert told.subject == "accelerate --use_fsdp"
    assert told.severity is Severity.WARNING
    assert "--fsdp-shard" in (told.hint or "")
    assert join_launcher(environ, sharded=True) == []
    assert environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    assert join_launcher({"ACCELERATE_USE_FSDP": "false"}, sharded=False) == []


@pytest.fixture(scope="module")
def held_weights(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts of the same float32 weights in one process, by DDP and by FSDP2."""
    root = tmp_path_factory.mktemp("held")
    done = launched("tests.e2e.held_weights", str(root), str(tiny.root))
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def test_accelerate_shards_a_pretrained_draft(
    tiny: Tiny, held_weights: Path, tmp_path: Path
) -> None:
    """Under --use_fsdp transformers would leave all but the first process without."""
    path = recipe(tmp_path, tiny)
    content = yaml.safe_load(path.read_text())
    pretrained = held_weights / "eagle3" / "alone" / "run" / "0"
    content["train"]["draft"] = {"from_pretrained": str(pretrained)}
    path.write_text(yaml.safe_dump(content))
    flags = ("--config", str(path), "--max-steps", "2", "--lr", "0.01", "--fsdp-shard")
    accelerate = (*ACCELERATE, "--use_fsdp", "-m", "spec_export.train")
    require_two(tmp_path, launched(*accelerate, *flags))


def said(folder: Path) -> dict[str, Any]:
    """All that an export says, but which run it is of."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    manifest = json.loads((folder / "spec_export_manifest.json").read_text())
    del manifest["run_id"], manifest["files"], manifest["training"]
    config = (folder / "config.json").read_bytes()
    return {"weights": data[start:], "config.json": config, **manifest}


PLACES = ("steps/step-00000001", "steps/step-00000002", "saves/step-00000002")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_give_the_same_export(
    held_weights: Path, kind: str, how: str
) -> None:
    """At a step, where we gather them, and at a save, where the trainer does."""
    for place in PLACES:
        alone = said(held_weights / kind / "alone" / place)
        assert said(held_weights / kind / how / place) == alone
        assert {t["role"] for t in alone["tensors"].values()} >= {"trained"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_of_the_weights_that_were_held(
    held_weights: Path, kind: str
) -> None:
    folder = held_weights / kind / "fsdp2" / PLACES[0]
    weights = load_torch_file(folder / "model.safetensors")
    value = weights[CHANGED]
    assert torch.equal(value, held(CHANGED, value.shape, 1).bfloat16())


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_weight_of_the_last_rank_makes_a_difference(
    held_weights: Path, kind: str, how: str
) -> None:
    """The control: between the two steps one number has changed."""
    before = said(held_weights / kind / "alone" / PLACES[0])
    after = said(held_weights / kind / how / PLACES[1])
    assert {name for name in before if before[name] != after[name]} == {
        "weights",
        "tensors",
    }
    tensors = before["tensors"]
    changed = {n for n, t in after["tensors"].items() if t != tensors[n]}
    assert changed == {CHANGED}


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
    return launched(*TORCHRUN, str(script), how, *arguments)


def test_a_sharded_model_is_gathered_once_for_both(tiny: Tiny, tmp_path: Path) -> None:
    """Once before the first step, then once for the save and its export together."""
    path = recipe(tmp_path, tiny)
    more = ("--max-steps", "1", "--epochs", "2", "--fsdp-shard")
    done = watched(tmp_path, "count", "--config", str(path), *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert done.stderr.count("gathered 3") == 2, done.stderr[-1000:]
    for step, save in ((1, "0"), (2, "1")):
        require_whole(tmp_path, step, save)


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
