"""The forward comparison of an export in training, against the live module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from spec_export.artifact.target import Target
from spec_export.export import Judge
from spec_export.judge import (
    Inputs,
    Leg,
    cast_leg,
    layout_leg,
    not_run,
    training_module,
)
from spec_export.judge.probe import MODULES
from spec_export.layout.releases import newest_known
from spec_export.training.recipe import CallbackConfig
from spec_export.training.snapshot import DTYPES, Snapshot, raw_module


def live_judge(
    model: Any, snapshot: Snapshot, target: Target | None, config: CallbackConfig
) -> Judge:
    """Make the judge of one export.

    Args:
        model: The live model; left as it is.
        snapshot: What was written.
        target: Gives the embedding that the export lacks.
        config: How many positions, steps and seconds.

    Returns:
        A function of the export's folder: leg *cast* and leg *layout*. What cannot
        be compared here is said and costs no export.
    """
    kind = snapshot.config["speculators_model_type"]

    def judge(folder: Path) -> Mapping[str, Leg]:
        if kind not in MODULES:
            return _neither(f"there is no reference for {kind} yet")
        try:
            return _legs(raw_module(model), snapshot, target, config, folder)
        except torch.OutOfMemoryError:
            return _neither("no memory is left on the device")

    return judge


def _legs(
    live: Any,
    snapshot: Snapshot,
    target: Target | None,
    config: CallbackConfig,
    folder: Path,
) -> Mapping[str, Leg]:
    inputs = Inputs.for_config(snapshot.config, positions=config.compare.positions)
    steps, seconds = config.compare.steps, config.compare.max_seconds
    dtype = DTYPES[config.dtype or "bfloat16"]
    device = next(live.parameters()).device
    served = target.path if target is not None and target.has_weights else None
    if isinstance(live, FSDPModule):
        # A forward of a sharded module is a collective, and rank 0 is alone here.
        cast = not_run("cast", "the live module is sharded")
    else:
        cast = cast_leg(live, inputs, dtype, steps, max_seconds=seconds)
    layout = layout_leg(
        folder,
        training_module(
            snapshot.config, snapshot.rounded, list(snapshot.tensors), device=device
        ),
        inputs,
        target=served,
        # Without the target at hand SGLang's side gets what training used for it.
        embed=snapshot.rounded("embed_tokens.weight") if served is None else None,
        release=config.sglang or newest_known(),
        device=device,
        steps=steps,
        max_seconds=seconds,
        saved_dtype=dtype,
        write_probe=True,
    )
    return {"cast": cast, "layout": layout}


def _neither(reason: str) -> Mapping[str, Leg]:
    return {"cast": not_run("cast", reason), "layout": not_run("layout", reason)}
