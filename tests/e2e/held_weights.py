"""Trainings whose weights are given: what is exported can depend on them alone.

As a program: each kind of draft in one process, by DDP and by FSDP2. The processes
are forked from one that has imported everything: that is what takes the time.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.tensor import DTensor, distribute_tensor

from spec_export.training.callback import SGLangExport
from spec_export.training.hook import TrainingEvent
from spec_export.training.snapshot import live_parameters
from tests.helpers.tiny import Tiny, run_training

KINDS = ("eagle3", "dspark")
# How many processes hold the draft, and the flags for that.
TOPOLOGIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "ddp": (2, ()),
    "fsdp2": (2, ("--fsdp-shard",)),
}
CHANGED = "fc.weight"  # what differs between the weights of step 1 and of step 2


def held(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """The weights of a parameter after a step: float32, of any process the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(shape, generator=generator) * 0.05
    if name == CHANGED and step == 2:
        value[-1, -1] *= 1.02  # the last row is the last rank's
    return value


class Hold:
    """Puts the weights of a step in the place of what its training made."""

    def on_event(self, event: TrainingEvent) -> None:
        if event.reason != "step":
            return
        for name, parameter in live_parameters(event.trainer.model).items():
            if not parameter.requires_grad:
                continue
            value: Any = held(name, parameter.shape, event.global_step)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                value = distribute_tensor(value, mesh, placements)
            with torch.no_grad():
                parameter.copy_(value)


def train(kind: str, tiny: Tiny, root: Path, *more: str) -> None:
    """Two steps; exported after each one, and at the trainer's own save."""
    exporters = [
        SGLangExport(
            output_dir=root / name,
            every=every,
            background=False,
            compare={"on": "never"},
            on_error="raise",
        )
        for name, every in (("steps", {"steps": 1}), ("saves", "checkpoint"))
    ]
    flags = [*_flags(kind, tiny, root), "--epochs", "1", "--max-steps", "2", *more]
    run_training(flags, Hold(), *exporters)


def _flags(kind: str, tiny: Tiny, root: Path) -> list[str]:
    if kind == "eagle3":
        return tiny.flags(root / "run")
    content = tiny.shipped(f"tiny_{kind}_cpu", root)
    recipe = root.with_suffix(".yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    mine = recipe.with_suffix(f".{os.getpid()}")
    mine.write_text(yaml.safe_dump(content))
    mine.replace(recipe)  # the other rank may be reading it
    return ["--config", str(recipe)]


def start(rank: int, world: int, port: int, act: Callable[[], None]) -> int:
    """Fork a rank, which finds what torchrun would have told it.

    Returns:
        Its process id.
    """
    pid = os.fork()
    if pid:
        return pid
    if world > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        os.environ.update(place | {name: str(n) for name, n in ranks.items()})
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(ranks: list[int]) -> bool:
    """Wait for all ranks, not for those whose partner is gone."""
    left = set(ranks)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for partner in left:
                os.kill(partner, signal.SIGKILL)
            return False
    return True


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def main(root: Path, tiny: Tiny) -> int:
    for kind in KINDS:
        for how, (world, flags) in TOPOLOGIES.items():
            act = functools.partial(train, kind, tiny, root / kind / how, *flags)
            port = free_port()
            ranks = [start(rank, world, port, act) for rank in range(world)]
            if not finish(ranks):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Tiny(Path(sys.argv[2]))))
