"""Plan, validate, write, judge, publish: once, for callback and ``finalize`` alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spec_export.artifact import manifest as m
from spec_export.artifact.compose import compose, facts_of_target, saved_as
from spec_export.artifact.disk import disk_errors, hash_file, write_file
from spec_export.artifact.dtypes import cast_blocks, choose_dtype, config_name
from spec_export.artifact.publish import (
    Staging,
    check_replaceable,
    publish_new,
    publish_step,
    replace_existing,
)
from spec_export.artifact.roles import (
    Known,
    derived_blocks,
    read_facts,
    saved_blocks,
)
from spec_export.artifact.source import Source
from spec_export.artifact.target import Target
from spec_export.artifact.values import check_mask_row, target_ids
from spec_export.artifact.verify_files import check_written
from spec_export.artifact.writer import Entry, write_weights
from spec_export.findings import (
    Finding,
    Severity,
    SpecExportError,
    apply_allow,
    check_allow,
    error,
    explains_difference,
    has_errors,
    usage_error,
    warning,
)
from spec_export.judge.verdict import Leg, LegName, not_run
from spec_export.layout.plan import PluginChoice, deviations, make_plan
from spec_export.layout.plan_types import Placement, Plan
from spec_export.layout.releases import parse_release

Status = Literal["saved", "final"]
Place = Literal["new", "replace", "step"]
Judge = Callable[[Path], Mapping[str, Leg]]


@dataclass(frozen=True)
class ExportOptions:
    """What the user decides about an export.

    Attributes:
        sglang: Oldest release that the deployers run; None is the newest known.
        plugin: Whether the serving plug-in may or must be used.
        allow: Deviation codes accepted by name.
        dtype: ``bfloat16``, ``float16``, ``float32`` or None.
        max_shard_size: For example ``5GB``.
        status: What the manifest says of an export that is all right.
    """

    sglang: str | None = None
    plugin: PluginChoice = "auto"
    allow: tuple[str, ...] = ()
    dtype: str | None = None
    max_shard_size: str | int | None = None
    status: Status = "saved"


@dataclass
class ExportResult:
    """What one run of the pipeline left.

    Attributes:
        folder: The published export.
        status: That of its manifest; ``failed`` when the comparison failed.
        manifest: The manifest as written.
        findings: Everything that was found, errors included when ``failed``.
        plan: How it was laid out.
    """

    folder: Path
    status: str
    manifest: m.Manifest
    findings: list[Finding] = field(default_factory=list)
    plan: Plan | None = None


def plan_source(source: Source, target: Target | None, options: ExportOptions) -> Plan:
    """Plan the export of a source; reads no weights.

    Raises:
        SpecExportError: exit 2 for options that make no sense.
    """
    check_allow(options.allow)
    release, findings = parse_release(options.sglang)
    choice = choose_dtype(_written_floats(source), options.dtype)
    plan = make_plan(
        source.config,
        source.tensors,
        facts_of_target(target),
        release,
        plugin=options.plugin,
        allow=options.allow,
        dtype=config_name(choice.dtype),
        recipe=_train_block(source.record.recipe),
    )
    plan.findings = [*findings, *plan.findings]
    return plan


def _train_block(recipe: dict[str, Any] | None) -> dict[str, Any] | None:
    """The settings of a recorded recipe: a file has them under ``train``."""
    inner = (recipe or {}).get("train", recipe)
    return inner if isinstance(inner, dict) else None


def _written_floats(source: Source) -> list[Any]:
    """The tensors that decide the saved dtype: integers and copies do not."""
    return [t for t in source.tensors.values() if t.is_float]


def export_source(
    source: Source,
    target: Target | None,
    options: ExportOptions,
    destination: Path,
    *,
    judge: Judge | None = None,
    finish: Callable[[Path, m.Manifest], None] | None = None,
    place: Place = "new",
    before: Sequence[Finding] = (),
    known: Known | None = None,
) -> ExportResult:
    """Write one export; the folder appears whole or not at all.

    Args:
        source: The draft.
        target: Its target; None where its configuration is not at hand, which is
            an error of the plan.
        options: The user's choices.
        destination: The export folder.
        judge: Compares what lies in the given folder with the training side; may
            leave a ``probe/`` there.
        finish: Adds files for people (model card) before the manifest is written.
        place: ``new``: the destination must be free. ``replace``: an export there
            gives way once the new one is complete. ``step``: a folder of a running
            training; a taken name gets a number, and an export whose comparison
            failed is published with the suffix ``.failed``.
        before: Findings of the way to the source; they are recorded too.
        known: What earlier exports of the same training saw of frozen tensors.

    Raises:
        SpecExportError: exit 1 where the answer is no; nothing new is left then,
            but a failed step. Exit 2 for options, existing paths, full disks.
    """
    if place != "step":
        check_free(destination, replace=place == "replace")
    plan = plan_source(source, target, options)
    if not plan.ok:
        raise SpecExportError([*before, *plan.findings])
    dtype = choose_dtype(_written_floats(source), options.dtype).dtype
    facts = read_facts(source, plan, target, dtype, known)
    facts.findings = apply_allow(facts.findings, options.allow)
    findings = [
        *before,
        *plan.findings,
        *facts.findings,
        *_worth_knowing(source, target, plan),
    ]
    if has_errors(findings):
        raise SpecExportError(findings)
    assert target is not None  # the plan needs its configuration
    manifest = compose(source, target, plan, facts, dtype)
    with Staging(destination.parent, destination.name) as staging:
        rows = target_ids(source.read("d2t")) if "d2t" in source.tensors else None
        written = write_weights(
            staging.path,
            _entries(source, target, plan, dtype, rows),
            m.weights_metadata(manifest),
            options.max_shard_size,
        )
        write_file(staging.path / "config.json", _pretty(plan.config))
        legs = _judged(staging.path, judge)
        findings += _verdict(legs, plan, options)
        failed = has_errors(findings)
        if failed and place != "step":
            raise SpecExportError(findings)
        manifest.status = "failed" if failed else options.status
        manifest.comparison = {
            name: m.Leg.model_validate(leg.to_json()) for name, leg in legs.items()
        }
        manifest.deviations = [
            m.Deviation(
                code=f.code, detail=f"{f.subject}: {f.message}", allowed_by=f.code
            )
            for f in deviations(findings, options.allow)
        ]
        manifest.findings = [m.FindingEntry(**f.to_json()) for f in findings]
        if finish is not None:
            finish(staging.path, manifest)
        manifest.files = file_entries(staging.path, written.files)
        manifest.write(staging.path)
        with disk_errors(staging.path):
            check_written(staging.path, manifest)
        folder = _publish(staging.path, destination, place, failed)
    return ExportResult(folder, manifest.status, manifest, findings, plan)


def check_free(destination: Path, *, replace: bool) -> None:
    """Refuse a taken output path before any work is done.

    Raises:
        SpecExportError: exit 2, ``output-exists``, or ``option-invalid`` for a path
            inside an export, whose manifest would not list what is put there.
    """
    for folder in destination.resolve().parents:
        if os.path.lexists(folder / m.MANIFEST_NAME):
            raise usage_error(
                "option-invalid",
                "--output",
                f"{destination} lies inside the export {folder}",
                "take an --output outside of it",
            )
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if not os.path.lexists(destination):
        return
    if replace:
        check_replaceable(destination)
        return
    raise usage_error(
        "output-exists",
        destination.name,
        f"{destination} exists",
        "--force replaces it, or take another --output",
    )


def _publish(staging: Path, destination: Path, place: Place, failed: bool) -> Path:
    if place == "step":
        return publish_step(
            staging, destination.parent, destination.name, failed=failed
        )
    if place == "replace":
        return replace_existing(staging, destination)
    return publish_new(staging, destination)


def _pretty(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def file_entries(
    folder: Path, known: Mapping[str, Any] | None = None
) -> dict[str, m.FileEntry]:
    """Digest and size of every file of an export but the manifest itself.

    Args:
        folder: The export or its staging folder.
        known: Facts of files that were hashed while they were written.
    """
    entries = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == m.MANIFEST_NAME:
            continue
        with disk_errors(path):
            fact = (known or {}).get(name) or hash_file(path)
        entries[name] = m.FileEntry(sha256=fact.sha256, size=fact.size)
    return entries


def _judged(folder: Path, judge: Judge | None) -> dict[str, Leg]:
    legs = {} if judge is None else dict(judge(folder))
    names: tuple[LegName, ...] = ("cast", "layout", "engine")
    for name in names:
        why = "no comparison was asked for" if judge is None else "not part of this run"
        legs.setdefault(name, not_run(name, why))
    return legs


def _verdict(
    legs: Mapping[str, Leg], plan: Plan, options: ExportOptions
) -> list[Finding]:
    """What the legs found; a failure that an allowed deviation explains is no error."""
    accepted = {f.code for f in deviations(plan.findings, options.allow)}
    findings: list[Finding] = []
    for leg in legs.values():
        explained = explains_difference(leg.leg, accepted)
        for found in leg.findings:
            if explained and found.severity is Severity.ERROR:
                found = warning(found.code, found.subject, found.message, found.hint)
            findings.append(found)
        if leg.verdict == "fail" and not has_errors(leg.findings) and not explained:
            findings.append(
                error("comparison-failed", leg.leg, leg.reason or "the leg failed")
            )
    return findings


def _worth_knowing(source: Source, target: Target | None, plan: Plan) -> list[Finding]:
    findings = []
    mask = plan.config.get("mask_token_id")
    if mask is not None and target is not None and target.has_weights:
        findings += check_mask_row(target, mask)
    if target is not None and not target.has_weights:
        findings.append(
            warning(
                "target-weights-missing",
                target.name,
                "the target's weights are not at hand: which tensors are copies of it "
                "and its digests are not recorded",
                "give a folder with its weights: --target DIR",
            )
        )
    changed, step = source.record.changed, source.record.global_step
    if changed is not None and step and not any(changed.values()):
        findings.append(
            warning(
                "nothing-trained",
                source.label,
                f"no tensor moved since the first step ({step} steps)",
                "look at the learning rate and the loss",
            )
        )
    return findings


def _entries(
    source: Source,
    target: Target | None,
    plan: Plan,
    dtype: str,
    rows: np.ndarray | None,
) -> list[Entry]:
    return [
        Entry(
            placement.name,
            saved_as(source, placement, dtype),
            placement.shape,
            lambda p=placement: _blocks(source, target, p, dtype, rows),  # type: ignore[misc]
        )
        for placement in plan.placements
    ]


def _blocks(
    source: Source,
    target: Target | None,
    placement: Placement,
    dtype: str,
    rows: np.ndarray | None,
) -> Iterator[np.ndarray]:
    if placement.transform is not None:
        yield from derived_blocks(source, placement, dtype)
        return
    name = placement.sources[0]
    if name.startswith("target:"):
        assert target is not None
        for piece in target.iter_rows("head", rows):
            yield from cast_blocks(piece, dtype)
        return
    yield from saved_blocks(source.read(name), placement.kind, dtype)
