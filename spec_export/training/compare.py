"""The forward comparison of an export in training, against the live module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spec_export.artifact.target import Target
from spec_export.comparison import borrowed, not_at_hand, window_of
from spec_export.export import Judge
from spec_export.judge import (
    Inputs,
    Leg,
    cast_leg,
    layout_leg,
    not_run,
    training_module,
)
from spec_export.judge.probe import MODULES, empty_module
from spec_export.layout.releases import newest_known
from spec_export.training.recipe import CallbackConfig
from spec_export.training.snapshot import DTYPES, Snapshot, raw_module

_NO_MEMORY = "no memory is left on the device"


def empty_draft(config: Mapping[str, Any]) -> nn.Module | None:
    """The training class without weights; None where there is no reference for it.

    Made once and in the training's own thread: that patches torch for a moment.
    """
    known = config["speculators_model_type"] in MODULES
    return empty_module(config) if known else None


def live_judge(
    model: Any,
    skeleton: nn.Module | None,
    snapshot: Snapshot,
    target: Target | None,
    config: CallbackConfig,
    in_haste: Callable[[], bool],
) -> Judge:
    """Compare the live module with its rounded self, and promise the other leg.

    Args:
        model: The live model; left as it is, and not needed afterwards.
        skeleton: ``empty_draft`` of its configuration; left as it is.
        snapshot: What will be written.
        target: Gives the embedding that the export lacks.
        config: How many positions, steps and seconds.
        in_haste: Whether there is no time for the other leg.

    Returns:
        A function of the export's folder, for any thread: leg *cast*, which ran, and
        leg *layout*. What cannot be compared here is said and costs no export.
    """
    live = raw_module(model)
    inputs = Inputs.for_config(snapshot.config, positions=config.compare.positions)
    device = next(live.parameters()).device
    if skeleton is None:
        kind = snapshot.config["speculators_model_type"]
        cast = not_run("cast", f"there is no reference for {kind} yet")
    else:
        cast = _cast(live, inputs, config)

    def judge(folder: Path) -> Mapping[str, Leg]:
        if skeleton is None:
            return {"cast": cast, "layout": not_run("layout", cast.reason)}
        if in_haste():
            layout = not_run("layout", "the training was interrupted")
            return {"cast": cast, "layout": layout}
        try:
            with _own_stream(device):
                layout = _layout(
                    folder, skeleton, snapshot, inputs, target, config, device
                )
        except torch.OutOfMemoryError:
            layout = not_run("layout", _NO_MEMORY)
        return {"cast": cast, "layout": layout}

    return judge


def _cast(live: Any, inputs: Inputs, config: CallbackConfig) -> Leg:
    if isinstance(live, FSDPModule):
        # A forward of a sharded module is a collective, and rank 0 is alone here.
        return not_run("cast", "the live module is sharded")
    try:
        return cast_leg(
            live,
            inputs,
            DTYPES[config.dtype or "bfloat16"],
            config.compare.steps,
            max_seconds=config.compare.max_seconds,
        )
    except torch.OutOfMemoryError:
        return not_run("cast", _NO_MEMORY)


def _layout(
    folder: Path,
    skeleton: nn.Module,
    snapshot: Snapshot,
    inputs: Inputs,
    target: Target | None,
    config: CallbackConfig,
    device: torch.device,
) -> Leg:
    served = target.path if target is not None and target.has_weights else None
    # What speculators leaves out when it saves, it took from the target.
    lent = borrowed(snapshot, target)
    if (why := not_at_hand(snapshot, lent)) is not None:
        return not_run("layout", why)
    return layout_leg(
        folder,
        training_module(
            snapshot.config,
            lambda name: lent[name] if name in lent else snapshot.rounded(name),
            [*snapshot.tensors, *lent],
            device=device,
            empty=copy.deepcopy(skeleton),
        ),
        inputs,
        target=served,
        # Without the target at hand SGLang's side gets what training used for it.
        embed=snapshot.rounded("embed_tokens.weight") if served is None else None,
        release=config.sglang or newest_known(),
        window=window_of(folder),
        device=device,
        steps=config.compare.steps,
        max_seconds=config.compare.max_seconds,
        saved_dtype=DTYPES[config.dtype or "bfloat16"],
        write_probe=True,
    )


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Do not queue behind the kernels of the training, nor let those wait."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()
