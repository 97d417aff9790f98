"""``finalize --merge-into``: a copy of a target with a trained MTP head in it.

SGLang serves an MTP head from its target's own checkpoint, without a draft folder. The
names, shapes, dtypes and files of the target stay as they are: a shard with ``mtp.*``
tensors is copied and their bytes are replaced in place, every other one is linked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spec_export.artifact.blocks import as_bytes
from spec_export.artifact.disk import disk_errors, write_file
from spec_export.artifact.publish import Staging, publish_new
from spec_export.artifact.resolve import resolve_source
from spec_export.artifact.roles import derived_blocks, saved_blocks
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import Target, open_target
from spec_export.artifact.values import scan
from spec_export.artifact.weights import WeightFiles
from spec_export.export import ExportOptions, check_free, plan_source
from spec_export.findings import (
    Finding,
    SpecExportError,
    check_allow,
    error,
    has_errors,
    usage_error,
    warning,
)
from spec_export.judge.verdict import Leg, not_run
from spec_export.layout.plan import deviations
from spec_export.layout.plan_types import Placement, Plan

SIDE_FILE = "spec_export_merge.json"
SCHEMA = "urn:spec-export:merge:v1"
_PREFIX = "mtp."
Shard = Literal["linked", "copied", "rewritten"]


@dataclass(frozen=True)
class MergeResult:
    """What was merged.

    Attributes:
        output: The merged copy.
        source: ``kind``, ``path`` and ``why`` of what was taken.
        min_version: The oldest SGLang release with the MTP class.
        trained: Tensors whose values differ from the target's.
        unchanged: ``mtp.*`` tensors that are the target's still.
        shards: What became of each weight file.
        leg: The forward comparison.
        findings: Everything found.
    """

    output: Path
    source: dict[str, str]
    min_version: str
    trained: list[str]
    unchanged: list[str]
    shards: dict[str, Shard]
    leg: Leg
    findings: list[Finding]

    def summary(self) -> dict[str, Any]:
        """What ``--json`` adds."""
        return {
            "source": self.source,
            "output": str(self.output),
            "verdict": self.leg.verdict,
            "min_version": self.min_version,
            "requires_plugin": False,
            "trained": self.trained,
            "unchanged": self.unchanged,
            "shards": self.shards,
        }

    def text(self) -> str:
        """For a person: counts and the server command."""
        return (
            f"{self.output}: {len(self.trained)} tensors trained, "
            f"{len(self.unchanged)} unchanged; comparison {self.leg.verdict}\n"
            f"python -m sglang.launch_server --model-path {self.output} "
            "--speculative-algorithm NEXTN"
        )


def merge_into(
    src: Path,
    into: Path,
    output: Path,
    options: ExportOptions,
    *,
    compare: bool = True,
    device: str = "auto",
) -> MergeResult:
    """Write a copy of a target in which its MTP head is the trained one.

    Args:
        src: A speculators MTP checkpoint, or a training's save_path.
        into: The target's folder, with its weights; a hub id is not enough.
        output: A new folder.
        options: Of the pipeline; ``dtype`` is the target's here.
        compare: Whether to run the forward comparison.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        SpecExportError: exit 1 where the answer is no, exit 2 for paths and options;
            nothing is left at the output path then.
    """
    check_allow(options.allow)
    resolved = resolve_source(src)
    if resolved.kind in ("export", "output_dir"):
        raise usage_error(
            "option-invalid", "--merge-into", f"{src} is an export", "give a checkpoint"
        )
    check_free(output, replace=False)
    source = CheckpointSource.open(resolved.folder)
    target, files = open_target(into), WeightFiles.open(into)
    plan = plan_source(source, target, options)
    findings = [*resolved.findings, *source.findings, *plan.findings]
    if has_errors(findings):
        raise SpecExportError(findings)
    placements = _fitted(plan, files)
    digests = _digests(source, placements, files, findings)
    trained = sorted(
        name for name in placements if digests[name] != scan(files.raw(name)).sha256
    )
    if not trained:
        findings.append(
            error(
                "nothing-trained",
                source.label,
                f"none of {len(placements)} mtp tensors differs from the target's",
                "look at the learning rate, or whether this is the right checkpoint",
            )
        )
    if has_errors(findings):
        raise SpecExportError(findings)
    with Staging(output.parent, output.name) as staging:
        shards = _copy(files, staging.path, placements)
        _replace(source, placements, files, staging.path)
        _reread(staging.path, digests)
        leg = not_run("layout", "no comparison was asked for")
        if compare:
            leg = _judged(source, target, staging.path, device, options)
        findings += _verdict(leg, plan, options)
        if has_errors(findings):
            raise SpecExportError(findings)
        result = MergeResult(
            output,
            {
                "kind": resolved.kind,
                "path": str(resolved.folder),
                "why": resolved.why,
            },
            plan.min_version,
            trained,
            sorted(set(placements) - set(trained)),
            shards,
            leg,
            findings,
        )
        _record(staging.path, result, target, digests)
        publish_new(staging.path, output)
    return result


def _fitted(plan: Plan, files: WeightFiles) -> dict[str, Placement]:
    """What goes to each ``mtp.*`` tensor of the target: the sets have to be equal.

    Raises:
        SpecExportError: names or shapes that differ, or a target without an MTP head.
    """
    theirs = {n: t for n, t in files.tensors.items() if n.startswith(_PREFIX)}
    if not theirs:
        raise SpecExportError(
            [
                error(
                    "target-unsupported",
                    files.folder.name,
                    f"none of its {len(files.tensors)} tensors is an mtp tensor",
                    "give the target that the head was trained for",
                )
            ]
        )
    ours = {placement.name: placement for placement in plan.placements}
    for fate in plan.fates:
        whole = fate.source.replace("mtp_layers.", "mtp.layers.", 1)
        if fate.fate == "transformed" and whole in theirs:
            # This target keeps all experts in one tensor, as training does.
            ours = {n: p for n, p in ours.items() if n not in fate.to}
            ours[whole] = Placement(whole, (fate.source,), None, fate.shape)
    problems = [
        error(
            "tensor-missing",
            name,
            f"the target has it ({list(theirs[name].shape)}), the checkpoint does not",
            "the checkpoint is not complete, or belongs to another target",
        )
        for name in sorted(set(theirs) - set(ours))
    ]
    problems += [
        error(
            "tensor-unexpected",
            name,
            "the checkpoint has it, the target does not",
            "the checkpoint belongs to another target",
        )
        for name in sorted(set(ours) - set(theirs))
    ]
    for name in sorted(set(ours) & set(theirs)):
        if ours[name].shape != theirs[name].shape:
            message = f"is {list(ours[name].shape)}, the target's {theirs[name].shape}"
            problems.append(error("shape-mismatch", name, message))
        elif not theirs[name].is_float:
            message = f"is {theirs[name].dtype} in the target, no plain weight"
            problems.append(error("dtype-unsupported", name, message))
    if problems:
        raise SpecExportError(problems)
    return ours


def _blocks(
    source: CheckpointSource, placement: Placement, dtype: str
) -> Iterator[np.ndarray]:
    if placement.transform is not None:
        return derived_blocks(source, placement, dtype)
    return saved_blocks(source.read(placement.sources[0]), placement.kind, dtype)


def _digests(
    source: CheckpointSource,
    placements: dict[str, Placement],
    files: WeightFiles,
    findings: list[Finding],
) -> dict[str, str]:
    """Digest of each merged tensor; impossible values become findings."""
    out = {}
    for name, placement in placements.items():
        scanned = scan(_blocks(source, placement, files.tensors[name].dtype))
        out[name] = scanned.sha256
        if scanned.non_finite:
            message = f"{scanned.non_finite} values are NaN or infinite"
            findings.append(error("non-finite", placement.sources[0], message))
    return out


def _copy(
    files: WeightFiles, folder: Path, placements: dict[str, Placement]
) -> dict[str, Shard]:
    """The target's files: shards without a replaced tensor are linked."""
    touched = {files.files[name] for name in placements}
    shards: dict[str, Shard] = {}
    for path in sorted(files.folder.iterdir()):
        if not path.is_file() or path.name == SIDE_FILE:
            continue
        here = folder / path.name
        with disk_errors(here):
            if path.name in files.headers and path.name not in touched:
                try:
                    os.link(path.resolve(), here)
                    shards[path.name] = "linked"
                    continue
                except OSError:  # another file system
                    shards[path.name] = "copied"
            elif path.name in touched:
                shards[path.name] = "rewritten"
            elif path.suffix == ".safetensors":
                continue  # no index names it; SGLang would load it
            shutil.copyfile(path, here)
    return shards


def _replace(
    source: CheckpointSource,
    placements: dict[str, Placement],
    files: WeightFiles,
    folder: Path,
) -> None:
    """Put the trained bytes where the target's were: same dtype, shape and place."""
    for name, placement in placements.items():
        shard = folder / files.files[name]
        span = files.headers[files.files[name]].tensors[name]
        with disk_errors(shard), shard.open("r+b") as file:
            file.seek(span.start)
            for block in _blocks(source, placement, span.info.dtype):
                file.write(as_bytes(block))
            if file.tell() != span.end:
                raise AssertionError(f"{name} has another size than the target's")
            file.flush()
            os.fsync(file.fileno())


def _reread(folder: Path, digests: dict[str, str]) -> None:
    """What lies on the disk is what was meant."""
    merged = WeightFiles.open(folder)
    wrong = [n for n, d in digests.items() if scan(merged.raw(n)).sha256 != d]
    if wrong:
        raise SpecExportError(
            [error("file-corrupt", wrong[0], "it was not written as it was computed")]
        )


def _judged(
    source: CheckpointSource,
    target: Target,
    folder: Path,
    device: str,
    options: ExportOptions,
) -> Leg:
    from spec_export import comparison

    comparison.require("speculators", "accelerate")
    return comparison.layout_of_merged(source, target, folder, device, options.sglang)


def _verdict(leg: Leg, plan: Plan, options: ExportOptions) -> list[Finding]:
    """The leg's findings; a failure is one whatever was allowed.

    The allowed deviation is about what the target hands over, not about this folder.
    """
    found = list(leg.findings)
    if leg.verdict == "fail" and not has_errors(found):
        found.append(error("comparison-failed", "layout", leg.reason or "it failed"))
    allowed = deviations(plan.findings, options.allow)
    notes = [n for n in leg.notes if any(n.startswith(f.code) for f in allowed)]
    found += [warning(f.code, f.subject, note) for f in allowed for note in notes]
    return found


def _record(
    folder: Path, result: MergeResult, target: Target, digests: dict[str, str]
) -> None:
    """The side file; no manifest, or strict loading would hold the target to it."""
    trained = set(result.trained)
    content = {
        "schema": SCHEMA,
        "target": target.name,
        "min_version": result.min_version,
        "counts": {"trained": len(trained), "unchanged": len(result.unchanged)},
        "tensors": {
            name: {
                "role": "trained" if name in trained else "frozen",
                "equals_target": name not in trained,
                "sha256": digest,
            }
            for name, digest in sorted(digests.items())
        },
        "shards": result.shards,
        "comparison": replace(result.leg, findings=()).to_json(),
        "findings": [f.to_json() for f in result.findings],
    }
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_file(folder / SIDE_FILE, text.encode())
