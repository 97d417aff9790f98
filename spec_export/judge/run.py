"""Leg 2, *layout*, end to end: from training, and again from a probe."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_export.judge.acceptance import both_sides, target_choice
from spec_export.judge.block_probe import (
    block_differences,
    block_rows,
    diagnose_block,
    is_block,
    proposals,
    reranked,
    size_problems,
)
from spec_export.judge.budget import fitting
from spec_export.judge.checks import (
    blind_inputs,
    blind_logits,
    capture_problems,
    config_of,
    dtype_problems,
    launch_problems,
    relabel,
    trained_layers,
    window_problems,
)
from spec_export.judge.compare import (
    REORDERED_FACTOR,
    calibrated,
    compare_logits,
    fixed,
)
from spec_export.judge.diagnose import diagnose
from spec_export.judge.explain import token_map_differences
from spec_export.judge.inputs import Inputs
from spec_export.judge.modes import (
    Change,
    ChangedWeights,
    ReorderedSums,
    rounded_to,
)
from spec_export.judge.mtp_probe import first_step_note, main_weight
from spec_export.judge.parts import (
    NEWEST,
    PROBE_NOTE,
    blind_leg,
    compare_chain,
    dtype_name,
    failed_leg,
    findings_of,
    is_small,
    layout_tolerance,
    notes_on,
    open_reference,
    over,
    problems_of,
    rounding_notes,
    scaled_weights,
    serve,
)
from spec_export.judge.probe import (
    drafting_module,
    target_ids,
    training_logits,
)
from spec_export.judge.reference.block import BlockReference
from spec_export.judge.reference.eagle3 import Eagle3Reference
from spec_export.judge.reference.mtp import MtpReference
from spec_export.judge.reference.serving_config import (
    ServingError,
)
from spec_export.judge.seeded import digest
from spec_export.judge.stored_probe import Probe, save_probe
from spec_export.judge.verdict import Leg, StepMetrics


def layout_leg(
    folder: Path,
    module: nn.Module,
    inputs: Inputs,
    *,
    target: Path | None = None,
    target_config: Mapping[str, Any] | None = None,
    embed: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    release: str = NEWEST,
    device: str | torch.device = "cpu",
    steps: int = 3,
    window: int | None = None,
    max_seconds: float | None = None,
    saved_dtype: torch.dtype | None = None,
    trained: Sequence[torch.Tensor] | None = None,
    write_probe: bool = False,
    probe_metadata: Mapping[str, Any] | None = None,
) -> Leg:
    """Leg 2: the training module against what SGLang makes of the export.

    The serving side reads the export folder and the target's embedding and head only.
    Compared are teacher-forced chained steps on all rows, greedy chains in which the
    drafted tokens are fed back, and the whole token map.

    Args:
        folder: The export.
        module: The training side (``training_module``, or a live module); its dtype is
            that of the computation on both sides. Not for FSDP: rebuild the module
            from a snapshot.
        inputs: The rows.
        target: Folder of the target model, opened here.
        target_config: Its ``config.json``, where it is not in that folder: it decides
            which layers' features SGLang takes.
        embed: The target's embedding, instead of ``target``.
        head: The target's head, where SGLang takes it from there.
        release: SGLang release whose rules apply.
        device: Where the serving side computes.
        steps: Chained draft steps.
        window: ``--speculative-draft-window-size`` of the launch line.
        max_seconds: Time budget; fewer positions are compared where it is short.
        saved_dtype: Round the training side's weights to it, for a live module.
        trained: The training side's logits of these very rows at ``saved_dtype``,
            where they are known already (``cast_with_logits``).
        write_probe: Write ``folder/probe/`` unless the leg fails.
        probe_metadata: JSON values to keep in the probe.

    Returns:
        The leg; never raises for what SGLang would refuse (that is a failed leg).
    """
    began = time.monotonic()
    draft = drafting_module(module)
    dtype = main_weight(draft).dtype
    about = target_config or config_of(target)
    if is_block(draft) and embed is not None and head is None:
        whole = draft.lm_head.weight  # training's copy of the target's, if it is whole
        head = whole if len(whole) == len(embed) else None
    reference = open_reference(
        folder, target, embed, head, release, device, window, dtype, about
    )
    if isinstance(reference, Leg):
        return reference
    relabelled = relabel(reference, target_ids(module))
    if isinstance(reference, BlockReference):
        steps, inputs = proposals(draft), block_rows(draft, inputs)
    blind = blind_inputs(inputs, block=is_block(draft))
    if blind is not None:
        return blind_leg(blind)

    saved = saved_dtype or dtype
    twice = scaled_weights(draft, reference)

    def training(
        rows: Inputs,
        compute: torch.dtype = dtype,
        others: Mapping[int, Change] = twice,
    ) -> list[torch.Tensor]:
        with ChangedWeights(
            lambda w: w.to(saved).to(compute),
            {key: lambda w, c=c: c(w).to(compute) for key, c in others.items()},  # type: ignore[misc]
        ):
            return training_logits(module, rows, steps, compute=compute)

    asked = len(inputs)
    if twice:
        trained = None  # the export holds other weights than were run
    reused = trained is not None
    if max_seconds is not None and trained is None:
        # Training, serving and reordered sums; then a chain of few rows.
        inputs = fitting(inputs, max_seconds, training, reference.device, full=3, few=3)
    try:
        if isinstance(reference, BlockReference):
            wrong = block_differences(reference, draft)
            if wrong:
                return failed_leg("layout", "; ".join(wrong), ())
        trained = list(trained or training(inputs))
        blind = blind_logits(trained, inputs.rows())
        if blind is not None:
            return blind_leg(blind)
        served = serve(reference, inputs, steps)
        metrics = compare_logits(trained, served, inputs.rows())
    except (ServingError, ValueError) as problem:
        return failed_leg("layout", str(problem), ())
    if is_small(draft.hidden_size, dtype, reference.device):
        tolerance = fixed()
    elif reused:
        # Had another module given these logits, its mistake would pass for noise.
        again = partial(serve, reference, steps=steps)
        tolerance = layout_tolerance(again, inputs, served, dtype)
    else:
        tolerance = layout_tolerance(training, inputs, trained, dtype)
    problems = problems_of(reference, metrics, tolerance)
    trained_on = trained_layers(draft.config)
    problems += capture_problems(folder, about, trained_on, release)
    problems += launch_problems(folder, about, release)
    problems += window_problems(reference, draft.config)
    if not isinstance(reference, MtpReference):  # a copy of its target holds several
        problems += dtype_problems(folder, reference.config.dtype)
    problems += token_map_differences(reference, target_ids(module))
    chains: tuple[StepMetrics, ...] = ()
    if not problems and not isinstance(reference, MtpReference):
        with ChangedWeights(rounded_to(saved), twice):
            chains = compare_chain(module, reference, inputs, steps, trained)
        problems = over(chains, tolerance, "logits of the free-running chain")
    diagnosis: list[str] = []
    if problems:
        with ChangedWeights(rounded_to(saved), twice):
            level = tolerance.max_rel
            if not isinstance(reference, Eagle3Reference):
                diagnosis = _diagnose_block(module, reference, inputs, level)
            else:
                diagnosis = diagnose(module, reference, inputs, steps, level, saved)
    elif write_probe:
        save_probe(
            folder,
            inputs,
            trained,
            hot_ids=target_ids(module),
            tolerance=tolerance,
            layers=trained_on,
            top_k=reranked(draft),
            metadata=probe_metadata,
        )
    acceptance: dict[str, float] | None = None
    counted: tuple[str, ...] = ()
    if inputs.recorded and not isinstance(reference, MtpReference):
        choice = target_choice(inputs, target, about, reference.device)
        ids = target_ids(module)
        acceptance, counted = both_sides(trained, served, inputs, ids, choice)
    return Leg(
        "layout",
        "fail" if problems else "pass",
        "; ".join(problems),
        device=str(reference.device),
        dtype=dtype_name(dtype),
        positions=len(inputs.rows()),
        steps=steps,
        metrics=metrics,
        free_running=chains,
        acceptance=acceptance,
        tolerance=tolerance,
        diagnosis=tuple(diagnosis),
        notes=(
            inputs.described(),
            *counted,
            *relabelled,
            *notes_on(reference, inputs),
            *first_step_note(draft, inputs, target),
            *(
                rounding_notes(training(inputs, others={}), trained, inputs.rows())
                if twice
                else ()
            ),
        ),
        seconds=time.monotonic() - began,
        findings=findings_of("layout", problems, diagnosis, asked, len(inputs)),
    )


def probe_leg(
    folder: Path,
    probe: Probe,
    *,
    target: Path | None = None,
    embed: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    release: str = NEWEST,
    device: str | torch.device = "cpu",
    window: int | None = None,
) -> Leg:
    """Leg 2 repeated from the probe that travels with an export.

    Needs neither speculators nor the training module. The tolerance is the larger of
    the recorded one, which is believed up to ``stored_probe.BELIEVED``, and the noise
    of the serving reference on this machine; for small shapes on a CPU the fixed one.

    Args:
        folder: The export.
        probe: ``load_probe(folder)``.
        target: Folder of the target model.
        embed: The target's embedding, instead of ``target``.
        head: The target's head.
        release: SGLang release whose rules apply.
        device: Where to compute, in float32.
        window: ``--speculative-draft-window-size`` of the launch line.
    """
    began = time.monotonic()
    dtype, inputs = torch.float32, probe.inputs
    about = config_of(target)
    reference = open_reference(
        folder, target, embed, head, release, device, window, dtype, about
    )
    if isinstance(reference, Leg):
        return reference
    ids = torch.arange(reference.config.draft_vocab_size)
    relabelled: tuple[str, ...] = ()
    if digest(reference.to_target(ids).cpu().long()) != probe.hot_ids_digest:
        # The probe does not hold the order of training, which is ascending.
        relabelled = relabel(reference, reference.to_target(ids).cpu().sort().values)
    try:
        served = serve(reference, inputs, probe.steps)
        metrics = probe.compare(served)
    except (ServingError, RuntimeError, ValueError) as problem:
        return failed_leg("layout", str(problem), ())
    tolerance = fixed()
    exact = probe.dtype == dtype_name(dtype)
    if not (exact and is_small(reference.config.hidden_size, dtype, reference.device)):
        with ReorderedSums():
            again = serve(reference, inputs.shifted(1), probe.steps)
        noise = compare_logits(served, again, inputs.rows())
        here = calibrated(noise, dtype, REORDERED_FACTOR, "reordered sums")
        tolerance = max(probe.believed(), here, key=lambda t: t.max_rel)
    problems = problems_of(reference, metrics, tolerance)
    problems += capture_problems(folder, about, probe.layers, release)
    if isinstance(reference, BlockReference):
        problems += size_problems(reference, probe.steps, probe.top_k)
    if digest(reference.to_target(ids).cpu().long()) != probe.hot_ids_digest:
        problems.append("the token map is not the one of training")
    return Leg(
        "layout",
        "fail" if problems else "pass",
        "; ".join(problems),
        device=str(reference.device),
        dtype=dtype_name(dtype),
        positions=len(inputs.rows()),
        steps=probe.steps,
        metrics=metrics,
        tolerance=tolerance,
        notes=(PROBE_NOTE, *relabelled, *notes_on(reference, inputs)),
        seconds=time.monotonic() - began,
        findings=findings_of("layout", problems, [], len(inputs), len(inputs)),
    )


def _diagnose_block(
    module: nn.Module,
    reference: BlockReference | MtpReference,
    inputs: Inputs,
    level: float,
) -> list[str]:
    """Both sides once more on a few rows of one document, stage by stage."""
    one = inputs.first(16)
    one = replace(one, document_ids=torch.zeros_like(one.document_ids), seed=None)
    trained: list[tuple[str, torch.Tensor]] = []
    served: list[tuple[str, torch.Tensor]] = []
    training_logits(module, one, 1, on_output=lambda n, v: trained.append((n, v)))
    reference.teacher_forced(
        one.token_ids,
        one.aux,
        one.position_ids,
        one.document_ids,
        1,
        lambda _, n, v: served.append((n, v)),
    )
    return diagnose_block(trained, served, level)
