"""The forward comparison of an export in training, against the live module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spec_export.artifact.target import Target
from spec_export.comparison import borrowed, not_at_hand, window_of
from spec_export.export import Judge
from spec_export.judge import Inputs, Leg, layout_leg, not_run, training_module
from spec_export.judge.cast import cast_with_logits
from spec_export.judge.checks import blind_inputs
from spec_export.judge.probe import MODULES, empty_module
from spec_export.layout.releases import newest_known
from spec_export.training.batches import Batch
from spec_export.training.draft_config import checkpoint_config
from spec_export.training.recipe import CallbackConfig
from spec_export.training.snapshot import DTYPES, Snapshot, raw_module

_NO_MEMORY = "no memory is left on the device"
# Both sides hold the draft in float32, and logits take some; the rest is for a training
# that grows meanwhile: it is the one that would end if its own allocation failed.
_FREE_BYTES = 16  # for each weight of the draft


def empty_draft(config: Mapping[str, Any]) -> nn.Module | None:
    """The training class without weights; None where there is no reference for it.

    Made once and in the training's own thread: that patches torch for a moment.
    """
    known = config["speculators_model_type"] in MODULES
    return empty_module(config) if known else None


@dataclass(frozen=True)
class Cast:
    """Leg *cast*, and what the other leg can use of it.

    Attributes:
        leg: The leg; ``not run`` with a reason where it could not.
        inputs: The rows.
        device: That of the live module.
        logits: The training side's at the saved dtype; None if they are not there, or
            were not computed in float32 as the other leg computes.
    """

    leg: Leg
    inputs: Inputs
    device: torch.device
    logits: list[torch.Tensor] | None = None


def rows_of(config: Mapping[str, Any], positions: int, batch: Batch | None) -> Inputs:
    """The rows to compare: half from a batch of the training, half from a seed.

    Recorded features have the sizes and outliers of real ones, and their text is that
    of an acceptance length; they can be too uniform to show a fault, so the others,
    which are made to show every channel, stay. These alone go into the probe that
    travels: text of a training is nobody else's.

    Args:
        config: The draft's, as of a checkpoint.
        positions: Rows in all.
        batch: What was recorded; None, or what cannot be used, gives seeded rows.
    """
    recorded = None if batch is None else _recorded(config, positions // 2, batch)
    if recorded is not None:
        rest = Inputs.for_config(config, positions=positions - len(recorded))
        if recorded.aux.shape[1] == rest.aux.shape[1]:
            return recorded.beside(rest)
    return Inputs.for_config(config, positions=positions)


def _recorded(config: Mapping[str, Any], positions: int, batch: Batch) -> Inputs | None:
    """Recorded rows that can show something; None where they cannot."""
    kind = config["speculators_model_type"]
    try:
        rows = Inputs.from_batch(
            batch.tensors, positions=positions, kind=kind, of=batch.kind
        )
    except (KeyError, ValueError):  # another batch than speculators' own
        return None
    block = kind not in ("eagle3", "mtp")
    return rows if blind_inputs(rows, block=block) is None else None


def is_sharded(model: Any) -> bool:
    """Whether a forward of the live model is a collective."""
    return isinstance(raw_module(model), FSDPModule)


def live_cast(
    model: Any,
    config: CallbackConfig,
    batch: Batch | None,
    max_seconds: float | None = None,
) -> Cast:
    """Compare the live module with its rounded self.

    Every rank has to call this for a sharded model, which is sharded again
    afterwards.

    Args:
        model: The trainer's; left as it is.
        config: How many positions and steps.
        batch: What was recorded; the same on every rank.
        max_seconds: Fewer positions are taken where these are short; a look at the
            clock is needed for that.
    """
    live, dtype = raw_module(model), config.dtype or "bfloat16"
    device = next(live.parameters()).device
    described = checkpoint_config(live.config, dtype)
    inputs = rows_of(described, config.compare.positions, batch)
    kind = described["speculators_model_type"]
    if kind not in MODULES:
        why = f"there is no reference for {kind} yet"
        return Cast(not_run("cast", why), inputs, device)
    try:
        leg, inputs, logits = cast_with_logits(
            live,
            inputs,
            DTYPES[dtype],
            config.compare.steps,
            max_seconds=max_seconds,
        )
    except torch.OutOfMemoryError:
        return Cast(not_run("cast", _NO_MEMORY), inputs, device)
    finally:
        for part in live.modules() if is_sharded(model) else ():
            if isinstance(part, FSDPModule):
                part.reshard()
    exact = all(values.dtype is torch.float32 for values in logits)
    return Cast(leg, inputs, device, logits if exact else None)


def live_judge(
    cast: Cast,
    skeleton: nn.Module | None,
    snapshot: Snapshot,
    target: Target | None,
    config: CallbackConfig,
    in_haste: Callable[[], bool],
) -> Judge:
    """Promise the other leg: what was written against what the training computes.

    Args:
        cast: ``live_cast`` of the same weights.
        skeleton: ``empty_draft`` of its configuration; left as it is.
        snapshot: What will be written.
        target: Gives the embedding that the export lacks.
        config: How many positions, steps and seconds.
        in_haste: Whether there is no time for the other leg.

    Returns:
        A function of the export's folder, for any thread: leg *cast*, which ran, and
        leg *layout*. What cannot be compared here is said and costs no export.
    """

    def judge(folder: Path) -> Mapping[str, Leg]:
        if skeleton is None:
            layout = not_run("layout", cast.leg.reason)
        elif in_haste():
            layout = not_run("layout", "the training was interrupted")
        elif _is_crowded(cast.device, skeleton):
            why = "the training leaves too little memory on the device"
            layout = not_run("layout", why)
        else:
            try:
                with _own_stream(cast.device):
                    layout = _layout(folder, skeleton, snapshot, cast, target, config)
            except torch.OutOfMemoryError:
                layout = not_run("layout", _NO_MEMORY)
        return {"cast": cast.leg, "layout": layout}

    return judge


def _layout(
    folder: Path,
    skeleton: nn.Module,
    snapshot: Snapshot,
    cast: Cast,
    target: Target | None,
    config: CallbackConfig,
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
            device=cast.device,
            empty=copy.deepcopy(skeleton),
        ),
        cast.inputs,
        target=served,
        target_config=target.config if target is not None else None,
        # Without the target at hand SGLang's side gets what training used for it.
        embed=snapshot.rounded("embed_tokens.weight") if served is None else None,
        release=config.sglang or newest_known(),
        window=window_of(folder),
        device=cast.device,
        steps=config.compare.steps,
        max_seconds=config.compare.max_seconds,
        saved_dtype=DTYPES[config.dtype or "bfloat16"],
        trained=cast.logits,
        write_probe=True,
    )


def _is_crowded(device: torch.device, draft: nn.Module) -> bool:
    """Whether a comparison beside the training could take what that needs."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return free < _FREE_BYTES * sum(p.numel() for p in draft.parameters())


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
