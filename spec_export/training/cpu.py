"""What lets speculators train on a machine without an accelerator.

speculators 0.9 asks for one in several places. Where none exists, and only there,
they are answered by the CPU, for as long as a training runs; flags whose defaults
need a GPU are changed where the user has left the default. On a machine with an
accelerator nothing is touched.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from speculators.train import checkpointer as speculators_checkpointer
from speculators.train import cli as speculators_cli
from speculators.train import distributed as speculators_distributed
from speculators.train.config import TrainConfig
from speculators.utils.loading import is_config_only_dir

from spec_export.findings import Finding, info

# What torch says about pinned memory and autocast to float32: nothing is wrong.
_EXPECTED_WARNINGS = ("'pin_memory' argument", "In CPU autocast")


def has_accelerator() -> bool:
    """Whether torch can use one; a CUDA build without a driver cannot."""
    return torch.accelerator.is_available()


def adapt_flags(config: TrainConfig) -> list[Finding]:
    """Change those defaults of speculators that need a GPU.

    What the user has set stays, so it fails as it would under speculators. The
    flags keep their provenance ``default``: ``run.yaml`` stays good for a GPU.

    Args:
        config: Changed in place.

    Returns:
        One ``adapted`` info for each flag.
    """
    changes = {
        # The fused loss is a Triton kernel.
        "loss_implementation": (config.loss, "eager"),
        # Dataloader workers are spawned: 15 s of imports each, for no gain.
        "num_workers": (config.data, 0),
    }
    if config.speculator_type != "mtp":
        # FlexAttention has no backward on the CPU; MTP chooses for itself.
        changes["draft_attn_impl"] = (config.draft, "sdpa")
    # A pretrained draft is loaded in bfloat16 and does not take float32 features;
    # a dry run saves in this dtype.
    pretrained = config.draft.from_pretrained
    if not config.dry_run and (not pretrained or is_config_only_dir(pretrained)):
        changes["hidden_states_dtype"] = (config.data, "float32")
    findings = []
    for name, (group, value) in changes.items():
        before = getattr(group, name)
        if config.provenance.get(name) == "default" and before != value:
            setattr(group, name, value)
            flag = "--" + name.replace("_", "-")
            findings.append(info("adapted", flag, f"{value} in the place of {before}"))
    return findings


@contextlib.contextmanager
def cpu_runtime() -> Iterator[type]:
    """Answer speculators' questions for an accelerator by the CPU.

    Yields:
        The trainer class to use in the place of speculators' own.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (torch.accelerator, "synchronize", lambda *_args, **_kwargs: None),
        (speculators_checkpointer, "get_current_device", lambda: "cpu"),
        (speculators_cli, "maybe_setup_distributed", setup_gloo),
    ]
    originals = [(o, name, getattr(o, name)) for o, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        with warnings.catch_warnings():
            for about in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", about)
            yield cpu_trainer(speculators_cli.Trainer)
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def cpu_trainer(trainer_class: type) -> type:
    """A subclass whose device is the CPU.

    ``Trainer.__init__`` assigns both attributes; a property wins over that.
    """

    def keep(_self: Any, _value: Any) -> None:
        return None

    return type(
        "CPUTrainer",
        (trainer_class,),
        {
            "local_rank": property(lambda _self: torch.device("cpu"), keep),
            "device_type": property(lambda _self: "cpu", keep),
        },
    )


def setup_gloo(sp_size: int = 1) -> None:
    """speculators' ``maybe_setup_distributed`` with the gloo backend.

    Args:
        sp_size: Ranks that share a sequence.
    """
    topology = speculators_distributed
    topology._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    topology._is_distributed = "LOCAL_RANK" in os.environ
    if not topology._is_distributed:
        return
    dist.init_process_group("gloo")
    topology._rank, topology._world_size = dist.get_rank(), dist.get_world_size()
    topology._init_sp_process_groups(topology._rank, topology._world_size, sp_size)
