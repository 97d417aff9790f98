"""``spec-export finalize``: checkpoint, run or saved export becomes a final one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec_export.artifact import manifest as m
from spec_export.artifact.disk import (
    disk_errors,
    read_regular,
    write_file,
)
from spec_export.artifact.dtypes import choose_dtype
from spec_export.artifact.finish import finish_in_place
from spec_export.artifact.publish import Staging, publish_new, replace_existing
from spec_export.artifact.resolve import (
    ResolvedSource,
    resolve_source,
    resolve_target,
)
from spec_export.artifact.runs import failed_exports
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import Target, open_target
from spec_export.artifact.verify_files import verify_files
from spec_export.artifact.writer import parse_size
from spec_export.export import (
    ExportOptions,
    ExportResult,
    check_free,
    export_source,
    file_entries,
)
from spec_export.findings import (
    Finding,
    Severity,
    SpecExportError,
    apply_allow,
    check_allow,
    error,
    has_errors,
    usage_error,
)
from spec_export.judge.verdict import ACCEPTANCE, Leg, not_run
from spec_export.layout.plan import deviations
from spec_export.layout.releases import parse_release
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.variables import dig
from spec_export.report.card import CARD_NAME, is_ours, model_card
from spec_export.serving.verify import (
    path_findings,
    release_findings,
    target_findings,
)


@dataclass(frozen=True)
class FinalizeOptions:
    """The options of the command.

    Attributes:
        output: Where the result goes; not needed for an export.
        target: The target's folder.
        compare: Whether to run the forward comparison.
        device: ``auto``, ``cpu`` or ``cuda``.
        force: Replace what is at the output path.
        export: Options of the pipeline.
    """

    output: Path | None = None
    target: Path | None = None
    compare: bool = True
    device: str = "auto"
    force: bool = False
    export: ExportOptions = field(default_factory=ExportOptions)


@dataclass
class FinalizeResult:
    """What the command reports.

    Attributes:
        source: ``kind``, ``path`` and ``why`` of what was taken.
        output: The final export.
        verdict: Of the layout leg.
        manifest: As written.
        findings: Everything found.
    """

    source: dict[str, str]
    output: Path
    verdict: str
    manifest: m.Manifest
    findings: list[Finding]


def finalize(src: Path, options: FinalizeOptions) -> FinalizeResult:
    """Make an export final.

    Args:
        src: A speculators checkpoint, a training's save_path, the callback's
            output_dir, or an export.
        options: As given on the command line.

    Returns:
        What was done.

    Raises:
        SpecExportError: exit 1 where the answer is no; nothing is left at a new
            output path and an old export stays. Exit 2 for paths and options.
    """
    check_allow(options.export.allow)
    resolved = resolve_source(src)
    finishing = resolved.kind in ("export", "output_dir")
    if options.output is None and not finishing:
        raise usage_error(
            "option-invalid",
            "--output",
            f"{src} is a {resolved.kind}; say where the export goes",
            "--output DIR",
        )
    if options.output is not None:
        check_free(options.output, replace=options.force)
    if finishing:
        return _finish(resolved, options)
    return _export(resolved, options)


def _described(resolved: ResolvedSource) -> dict[str, str]:
    return {
        "kind": resolved.kind,
        "path": str(resolved.folder),
        "why": resolved.why,
    }


def _export(resolved: ResolvedSource, options: FinalizeOptions) -> FinalizeResult:
    assert options.output is not None
    source = CheckpointSource.open(resolved.folder)
    name = dig(source.config, "speculators_config.verifier.name_or_path")
    target, findings = resolve_target(
        name if isinstance(name, str) else None, resolved.folder, options.target
    )
    before = [*resolved.findings, *source.findings, *findings]
    _keep_inputs(options.output, resolved.folder, target)
    before += path_findings(options.output)
    judge = checkpoint_judge(source, target, options) if options.compare else None
    try:
        result = export_source(
            source,
            target,
            replace(options.export, status="final"),
            options.output,
            judge=judge,
            finish=_add_card,
            place="replace" if options.force else "new",
            before=before,
        )
    finally:
        problem = source.check_unchanged()
    if problem:
        _withdraw(result, options)
        raise SpecExportError([*result.findings, *problem])
    return FinalizeResult(
        _described(resolved),
        result.folder,
        _verdict_of(result.manifest),
        result.manifest,
        result.findings,
    )


def _keep_inputs(output: Path, source: Path, target: Target | None) -> None:
    """With ``--force``: what is read must not be what is replaced.

    Raises:
        SpecExportError: exit 2, ``output-exists``.
    """
    place = output.resolve()
    inputs = {"the checkpoint": source.resolve()}
    if target is not None:
        inputs["the target"] = target.path.resolve()
    for what, folder in inputs.items():
        if folder.is_relative_to(place):
            raise usage_error(
                "output-exists",
                output.name,
                f"{output} is {what} itself, or holds it; --force would delete it",
                "take another --output",
            )


def _withdraw(result: ExportResult, options: FinalizeOptions) -> None:
    """The source changed while it was read: what was written cannot be trusted."""
    if not options.force:
        shutil.rmtree(result.folder, ignore_errors=True)


def _verdict_of(manifest: m.Manifest) -> str:
    leg = manifest.comparison.get("layout")
    return (leg.verdict if leg is not None else None) or "not run"


def _add_card(folder: Path, manifest: m.Manifest) -> None:
    write_file(folder / CARD_NAME, model_card(manifest).encode())


def checkpoint_judge(
    source: CheckpointSource, target: Target | None, options: FinalizeOptions
) -> Callable[[Path], Mapping[str, Leg]]:
    """The comparison of a checkpoint: speculators' class against the reference."""
    from spec_export import comparison

    comparison.require("speculators", "accelerate")
    return comparison.judge_of_checkpoint(
        source, target, options.device, options.export.sglang
    )


def _finish(resolved: ResolvedSource, options: FinalizeOptions) -> FinalizeResult:
    """Finish an export in place, or a copy of it; weights are not rewritten."""
    folder = resolved.folder
    manifest = m.Manifest.read(folder)
    if _elsewhere(folder, options) is None:
        _keep_card(folder, manifest)
    release, findings = parse_release(options.export.sglang)
    _check_fixed(manifest, options.export)
    findings += [*resolved.findings, *verify_files(folder, manifest)]
    if resolved.kind == "output_dir":
        findings += failed_exports(folder.parent, manifest.run_id, folder)
    if manifest.status == "failed":
        findings.append(
            error(
                "export-failed-status",
                m.MANIFEST_NAME,
                "the forward comparison of this export failed when it was written",
                "finalize another checkpoint of the training",
            )
        )
    if has_errors(findings):
        raise SpecExportError(findings)
    target = _target_of_export(manifest, folder, options)
    if options.export.sglang is not None:
        findings += release_findings(manifest, release)
    if options.target is not None:
        findings += target_findings(manifest, target)
    findings = apply_allow(findings, options.export.allow)
    if has_errors(findings):
        raise SpecExportError(findings)
    legs = dict(manifest.comparison)
    if options.compare:
        leg = _compare_again(folder, manifest, target, options)
        findings += leg.findings
        if leg.verdict == "fail" and not has_errors(findings):
            findings.append(error("comparison-failed", "layout", leg.reason))
        # The bytes are those of the manifest: what was found about them once holds.
        if leg.ran or not legs.get("layout", m.Leg(ran=False)).ran:
            again = m.Leg.model_validate(leg.to_json())
            if (before_it := legs.get("layout")) is not None:
                # Of text that does not travel, and of these very bytes.
                again.acceptance = before_it.acceptance
                again.notes += [n for n in before_it.notes if n.startswith(ACCEPTANCE)]
            legs["layout"] = again
        engine = _engine_again(folder, leg, target, options)
        findings += engine.findings
        if engine.ran or not legs.get("engine", m.Leg(ran=False)).ran:
            legs["engine"] = m.Leg.model_validate(engine.to_json())
    findings += path_findings(options.output or folder)
    findings = apply_allow(findings, options.export.allow)
    if has_errors(findings):
        raise SpecExportError(findings)
    manifest.status, manifest.comparison = "final", legs
    accepted = deviations(findings, options.export.allow)
    manifest.deviations += [
        m.Deviation(code=f.code, detail=f"{f.subject}: {f.message}", allowed_by=f.code)
        for f in accepted
        if f.code not in {d.code for d in manifest.deviations}
    ]
    kept = [f for f in manifest.findings if f.code not in {x.code for x in findings}]
    manifest.findings = [*kept, *(m.FindingEntry(**f.to_json()) for f in findings)]
    output = _write_final(folder, manifest, options)
    return FinalizeResult(
        _described(resolved), output, _verdict_of(manifest), manifest, findings
    )


def _check_fixed(manifest: m.Manifest, options: ExportOptions) -> None:
    """Refuse options that would need other weights than the export has.

    Raises:
        SpecExportError: exit 2, ``option-invalid``.
    """
    hint = "finalize the checkpoint that it was made from"
    if options.max_shard_size is not None:
        parse_size(options.max_shard_size)  # of what is written, which is nothing
    held = [TensorInfo(n, t.dtype, tuple(t.shape)) for n, t in manifest.tensors.items()]
    casts = choose_dtype(held, options.dtype).casts if options.dtype else ()
    if casts:
        raise usage_error(
            "option-invalid",
            "--dtype",
            f"{casts[0].name} is {casts[0].from_} in the export, and finishing it "
            "rewrites no weights",
            hint,
        )
    needed = manifest.serving.requires_plugin
    if options.plugin == ("never" if needed else "always"):
        raise usage_error(
            "option-invalid",
            "--plugin",
            f"{options.plugin}: the export is written for "
            f"{manifest.serving.architecture}, and finishing it rewrites nothing",
            hint,
        )


def _elsewhere(folder: Path, options: FinalizeOptions) -> Path | None:
    """Where a copy is finished; None: the export itself is."""
    output = options.output
    return None if output is None or output.resolve() == folder else output


def _keep_card(folder: Path, manifest: m.Manifest) -> None:
    """A card that somebody wrote by hand is not replaced by ours.

    Raises:
        SpecExportError: exit 2, ``output-exists``.
    """
    card = folder / CARD_NAME
    if CARD_NAME in manifest.files or not os.path.lexists(card):
        return
    try:
        if is_ours(read_regular(card)):  # of a finalize that was killed
            return
    except OSError:
        pass
    raise usage_error(
        "output-exists",
        CARD_NAME,
        f"{card} is not ours, and finishing the export in place would replace it",
        "move it away, or take an --output",
    )


def _write_final(folder: Path, manifest: m.Manifest, options: FinalizeOptions) -> Path:
    card = model_card(manifest).encode()
    output = _elsewhere(folder, options)
    if output is None:
        finish_in_place(folder, manifest, CARD_NAME, card)
        return folder
    with Staging(output.parent, output.name) as staging:
        for name in manifest.files:
            place = staging.path / name
            with disk_errors(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, place)
        write_file(staging.path / CARD_NAME, card)
        manifest.files = file_entries(staging.path)
        manifest.write(staging.path)
        publish = replace_existing if options.force else publish_new
        return publish(staging.path, output)


def _target_of_export(
    manifest: m.Manifest, folder: Path, options: FinalizeOptions
) -> Target | None:
    if options.target is not None:
        return open_target(options.target)
    return resolve_target(manifest.target_model.name, folder)[0]


def _compare_again(
    folder: Path,
    manifest: m.Manifest,
    target: Target | None,
    options: FinalizeOptions,
) -> Leg:
    """Leg 2 from the probe that travels with the export."""
    from spec_export import comparison

    if not (folder / "probe").is_dir():
        return not_run("layout", "the export carries no probe of the training side")
    comparison.require()
    return comparison.leg_of_probe(
        folder, target, options.device, options.export.sglang
    )


def _engine_again(
    folder: Path, layout: Leg, target: Target | None, options: FinalizeOptions
) -> Leg:
    """Leg 3, where leg 2 has just passed: what it stands on."""
    from spec_export import comparison

    if not layout.passed:
        return not_run("engine", "the leg layout has not passed")
    return comparison.engine_of_export(
        folder, target, options.device, options.export.sglang
    )


def summary(result: FinalizeResult) -> dict[str, Any]:
    """What ``finalize --json`` adds to its object."""
    return {
        "source": result.source["path"],
        "source_kind": result.source["kind"],
        "source_why": result.source["why"],
        "output": str(result.output),
        "verdict": result.verdict,
        "min_version": result.manifest.serving.min_version,
        "requires_plugin": result.manifest.serving.requires_plugin,
        "warnings": sum(f.severity is Severity.WARNING for f in result.findings),
    }
