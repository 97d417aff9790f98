"""Which checkpoint, export or target a path or name given by a user stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spec_export.artifact.manifest import MANIFEST_NAME, Manifest
from spec_export.artifact.source import (
    epoch_number,
    incomplete_because,
    looks_like_checkpoint,
)
from spec_export.artifact.target import Target, from_hub_cache, open_target
from spec_export.artifact.weights import has_weights
from spec_export.findings import (
    Finding,
    SpecExportError,
    error,
    info,
    usage_error,
    warning,
)

SourceKind = Literal["checkpoint", "run", "export", "output_dir"]
BEST_CHECKPOINT = "checkpoint_best"
INTERRUPTED = "interrupted"
_PARENTS_SEARCHED = 4
STEP_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?(\.failed)?", re.ASCII)


@dataclass
class ResolvedSource:
    """What a path stands for.

    Attributes:
        kind: What was given.
        folder: The checkpoint or export to take, without links in it.
        why: One sentence for the user: what was taken and why.
        findings: Infos and warnings, among them what was passed over.
    """

    kind: SourceKind
    folder: Path
    why: str
    findings: list[Finding] = field(default_factory=list)


def resolve_source(path: str | Path) -> ResolvedSource:
    """Find the folder to export or to finish (``finalize SRC``).

    An export is itself; an ``output_dir`` of the callback stands for its link
    ``best``, else ``latest``; a save_path for ``checkpoint_best``, else its newest
    complete epoch, else ``interrupted``; a checkpoint is itself. Epochs go before
    weights in the root of a save_path: a dry run leaves untrained ones there.

    Raises:
        SpecExportError: exit 2 ``path-missing`` where there is no model; exit 1
            where there are checkpoints and none is complete.
    """
    path = Path(path)
    if not path.exists():
        raise usage_error("path-missing", path.name, f"{path} is not there")
    if not path.is_dir():
        raise usage_error(
            "path-missing",
            path.name,
            f"{path} is a file",
            "give the folder that holds it",
        )
    folder = path.resolve()
    try:
        if (folder / MANIFEST_NAME).is_file():
            return ResolvedSource("export", folder, f"{folder.name} is an export")
        return (
            _from_output_dir(folder)
            or _from_run(folder)
            or _checkpoint(folder)
            or _interrupted(folder, [])
            or _nothing(folder)
        )
    except PermissionError as problem:
        raise usage_error(
            "path-missing", folder.name, f"{folder} cannot be read: {problem.strerror}"
        ) from problem


def _from_output_dir(folder: Path) -> ResolvedSource | None:
    steps = step_folders(folder)
    if not steps:
        return None
    findings: list[Finding] = []
    for link in ("best", "latest"):
        at = folder / link
        if not at.is_symlink():
            continue
        if at.resolve() in steps:
            return ResolvedSource(
                "output_dir",
                at.resolve(),
                f"{at.resolve().name}, to which {link} points",
                [
                    *findings,
                    _chosen(at.resolve(), f"{link} points to it"),
                    *_of_another_run(at.resolve(), (folder / "latest").resolve()),
                ],
            )
        findings.append(
            warning(
                "checkpoint-incomplete",
                link,
                f"the link {link} does not lead to an export of {folder.name}",
            )
        )
    sound = [step for step in steps if not step.name.endswith(".failed")]
    if not sound:
        raise SpecExportError(
            [
                error(
                    "export-failed-status",
                    folder.name,
                    "every export in it failed its comparison",
                    "give one of the folders by name",
                )
            ]
        )
    newest = sound[-1]
    why = f"{newest.name}, the newest export; there is no link best or latest"
    return ResolvedSource(
        "output_dir", newest, why, [*findings, _chosen(newest, "the newest export")]
    )


def _of_another_run(chosen: Path, latest: Path) -> list[Finding]:
    """Trainings may share an output_dir, and the newest may have no best one yet."""
    try:
        one, other = Manifest.read(chosen).run_id, Manifest.read(latest).run_id
    except SpecExportError:
        return []  # whoever reads the chosen one says what is wrong
    if one == other:
        return []
    return [
        warning(
            "runs-mixed",
            chosen.name,
            f"it is of run {one}; {latest.name}, the latest export, is of run {other}",
            f"give {latest.name} by name if the later training is meant",
        )
    ]


def step_folders(parent: Path) -> list[Path]:
    """The exports of an output_dir that have a manifest, by step and number."""
    found = []
    for child in parent.iterdir():
        match = STEP_FOLDER.fullmatch(child.name)
        if match and not child.is_symlink() and (child / MANIFEST_NAME).is_file():
            key = (int(match[1]), int(match[2] or 1), match[3] or "")
            found.append((key, child))
    return [child for _, child in sorted(found)]


def _from_run(folder: Path) -> ResolvedSource | None:
    findings: list[Finding] = []
    best = folder / BEST_CHECKPOINT
    if best.is_symlink() or best.is_dir():
        because = (
            incomplete_because(best) if best.exists() else "its epoch is not there"
        )
        if because is None:
            chosen = best.resolve()
            text = f"{BEST_CHECKPOINT} points to it"
            return ResolvedSource(
                "run", chosen, f"{chosen.name}: {text}", [_chosen(chosen, text)]
            )
        findings.append(warning("checkpoint-incomplete", BEST_CHECKPOINT, because))
    epochs = sorted(
        (
            (epoch, child)
            for child in folder.iterdir()
            if (epoch := epoch_number(child.name)) is not None
            and child.is_dir()
            and not child.is_symlink()
        ),
        reverse=True,
    )
    for _, child in epochs:
        because = incomplete_because(child)
        if because is None:
            text = "the newest complete epoch"
            return ResolvedSource(
                "run",
                child,
                f"epoch {child.name}, {text}; there is no usable {BEST_CHECKPOINT}",
                [*findings, _chosen(child, text)],
            )
        findings.append(warning("checkpoint-incomplete", child.name, because))
    if not findings:
        return None
    return _interrupted(folder, findings) or _none_complete(folder, findings)


def _interrupted(folder: Path, findings: list[Finding]) -> ResolvedSource | None:
    child = folder / INTERRUPTED
    if not child.is_dir():
        return None
    because = incomplete_because(child)
    if because is not None:
        return _none_complete(
            folder,
            [*findings, warning("checkpoint-incomplete", INTERRUPTED, because)],
        )
    text = "the only complete one; its epoch and step are not recorded"
    return ResolvedSource(
        "run", child, f"{INTERRUPTED}: {text}", [*findings, _chosen(child, text)]
    )


def _checkpoint(folder: Path) -> ResolvedSource | None:
    if looks_like_checkpoint(folder):
        return ResolvedSource("checkpoint", folder, f"{folder.name} is a checkpoint")
    return None


def _nothing(folder: Path) -> ResolvedSource:
    if (folder / "config.json").is_file():
        why = "holds a config.json but no weights"
    elif has_weights(folder):
        why = "holds weights but no config.json"
    else:
        why = "is no checkpoint, no save_path, no output_dir and no export"
    raise usage_error(
        "path-missing",
        folder.name,
        f"{folder} {why}",
        "give a speculators checkpoint folder, or the save_path of a training",
    )


def _none_complete(folder: Path, findings: list[Finding]) -> ResolvedSource:
    raise SpecExportError(
        [error("checkpoint-incomplete", f.subject, f.message, f.hint) for f in findings]
        + [
            error(
                "path-missing",
                folder.name,
                "none of its checkpoints is complete",
                "wait until the training has saved one",
            )
        ]
    )


def _chosen(folder: Path, why: str) -> Finding:
    return info("checkpoint-chosen", folder.name, why)


def resolve_target(
    name_or_path: str | None,
    checkpoint_dir: Path | None,
    explicit: str | Path | None = None,
) -> tuple[Target | None, list[Finding]]:
    """Find the target of a draft.

    Args:
        name_or_path: What the checkpoint stores, possibly a relative path of the
            machine that trained it.
        checkpoint_dir: Where a relative path is looked for, with its parents.
        explicit: From ``--target``; wins, and has to exist.

    Returns:
        The target, or None and a warning that says where it was looked for.

    Raises:
        SpecExportError: exit 2 if an explicit target is absent; exit 1 for a
            target with corrupt files.
    """
    if explicit is not None:
        return open_target(explicit), []
    if not name_or_path:
        return None, [_absent("the checkpoint does not name its target")]
    stored = Path(name_or_path)
    if stored.is_absolute():
        if (stored / "config.json").is_file():
            return open_target(stored), []
        return None, [_absent(f"the checkpoint names {stored}, which is not there")]
    bases = [Path.cwd()]
    if checkpoint_dir is not None:
        folder = checkpoint_dir.resolve()
        bases += [folder, *list(folder.parents)[:_PARENTS_SEARCHED]]
    for base in bases:
        if (base / stored / "config.json").is_file():
            found = info(
                "target-path-relative",
                "speculators_config.verifier.name_or_path",
                f"the checkpoint names its target {name_or_path!r}; the folder of "
                f"this name under {base} was taken",
                "--target DIR takes another one",
            )
            return open_target(base / stored), [found]
    cached = from_hub_cache(name_or_path)
    if cached is not None:
        return Target(cached, name_or_path), []
    looked = ", ".join(str(base) for base in bases)
    return None, [
        warning(
            "target-path-relative",
            "speculators_config.verifier.name_or_path",
            f"the checkpoint names its target {name_or_path!r}; it was looked for "
            f"under {looked}, and in the local hub cache",
            "give its folder: --target DIR",
        )
    ]


def _absent(why: str) -> Finding:
    return warning(
        "target-weights-missing",
        "speculators_config.verifier.name_or_path",
        why,
        "give the target's folder: --target DIR",
    )
