"""Strict loading: a server that would draft with something else does not start.

``SPEC_EXPORT_STRICT`` is ``auto`` (the default: folders with our manifest), ``on``
(every draft folder) or ``off``. ``SPEC_EXPORT_ALLOW=code,code`` accepts findings by
name, as ``--allow`` does.

What headers, configs and digests of files can tell is checked in the launcher, before
any child process and before the target's weights: an error there is an ordinary
exception. What SGLang made of the tensors is checked after loading (``landing``); an
error there ends the scheduler, which takes its server with it.

No torch here, and nothing of the package is imported before a draft with a manifest
was found: SGLang's processes import this module at their start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export.findings import (
    Finding,
    Severity,
    SpecExportError,
    apply_allow,
    check_allow,
    usage_error,
)

if TYPE_CHECKING:
    from spec_export.artifact.manifest import Manifest
    from spec_export.artifact.target import Role, Target

logger = logging.getLogger(__name__)

STRICT, ALLOW = "SPEC_EXPORT_STRICT", "SPEC_EXPORT_ALLOW"
MODES = ("auto", "on", "off")
# artifact.manifest.MANIFEST_NAME, which would import pydantic for one word.
MANIFEST = "spec_export_manifest.json"
# The folder whose files the launcher has hashed, for its child processes.
_CHECKED = "SPEC_EXPORT_CHECKED"
# Set on a model that was loaded: what comes later are updates of weights.
_LOADED = "_spec_export_loaded"


class DraftRefused(SpecExportError):
    """The draft is not served; the text is for the person who started the server."""

    def __init__(self, folder: Path, findings: Iterable[Finding]) -> None:
        super().__init__(findings)
        self.folder = folder

    def __str__(self) -> str:
        text = (
            f"spec-export does not let SGLang serve the draft in {self.folder} "
            f"({STRICT}={mode()}):"
        )
        for finding in self.findings:
            text += f"\n{_line(finding)}"
            if finding.hint:
                text += f"\n  hint: {finding.hint}"
        return text


def mode() -> str:
    """The value of ``SPEC_EXPORT_STRICT``.

    Raises:
        SpecExportError: it is none of ``MODES``.
    """
    value = os.environ.get(STRICT) or "auto"
    if value not in MODES:
        raise usage_error(
            "option-invalid", STRICT, f"{value!r} is none of {', '.join(MODES)}"
        )
    return value


def allowed() -> tuple[str, ...]:
    """The codes in ``SPEC_EXPORT_ALLOW``.

    Raises:
        SpecExportError: one that does not exist or that nobody may allow.
    """
    words = os.environ.get(ALLOW, "").split(",")
    codes = tuple(word.strip() for word in words if word.strip())
    check_allow(codes)
    return codes


def local_folder(path: str | None) -> Path | None:
    """A model path of SGLang as a folder of this machine; None if it is none yet."""
    if not path:
        return None
    folder = Path(path)
    if folder.is_dir():
        return folder
    from spec_export.artifact.target import from_hub_cache

    return from_hub_cache(path)


def check_launch(draft: str | None, target: str | None, release: str) -> None:
    """Check a draft folder and its target before the server starts.

    Args:
        draft: ``--speculative-draft-model-path``; without one nothing is done.
        target: ``--model-path``.
        release: SGLang's own version.

    Raises:
        DraftRefused: an error finding that is not allowed.
    """
    strict, folder = mode(), local_folder(draft)
    if strict == "off" or folder is None:
        return
    if strict == "auto" and not (folder / MANIFEST).is_file():
        return
    allow = allowed()
    from spec_export.serving.verify import verify

    with ThreadPoolExecutor(1) as worker:
        try:
            result = verify(
                folder,
                _served_target(target, folder, worker),
                sglang=_known_release(release),
                allow=allow,
            )
        except SpecExportError as problem:
            raise DraftRefused(folder, problem.findings) from problem
    report(folder, result.findings)
    os.environ[_CHECKED] = str(folder.resolve())


def report(folder: Path, findings: Iterable[Finding]) -> None:
    """Log warnings, raise errors.

    Raises:
        DraftRefused: there is an error among the findings.
    """
    errors = []
    for finding in findings:
        if finding.severity is Severity.ERROR:
            errors.append(finding)
        elif finding.severity is Severity.WARNING:
            logger.warning("spec-export: %s: %s", folder, _line(finding))
    if errors:
        raise DraftRefused(folder, errors)


def load_weights(
    model: Any,
    load: Callable[[Iterable[tuple[str, Any]]], Any],
    weights: Iterable[tuple[str, Any]],
) -> Any:
    """Load a draft's weights and compare what landed with its manifest.

    Args:
        model: A draft of SGLang; its ``config`` says which folder it came from.
        load: The model's own ``load_weights``.
        weights: Name and tensor, as SGLang's loader reads them.

    Returns:
        What ``load`` returns.

    Raises:
        DraftRefused: a tensor or a parameter that is not what the manifest says.
    """
    folder = draft_folder(model)
    if folder is None or getattr(model, _LOADED, False):
        return load(weights)
    from spec_export.serving.landing import load_and_compare

    hashed = os.environ.get(_CHECKED) != str(folder.resolve())
    result, findings = load_and_compare(model, load, weights, folder, hashed)
    report(folder, apply_allow(findings, allowed()))
    setattr(model, _LOADED, True)
    return result


def draft_folder(model: Any) -> Path | None:
    """The folder with a manifest that a model was made from, if it is to be checked."""
    if mode() == "off":
        return None
    path = getattr(getattr(model, "config", None), "_name_or_path", None)
    folder = local_folder(path) if isinstance(path, str) else None
    return folder if folder is not None and (folder / MANIFEST).is_file() else None


def _line(finding: Finding) -> str:
    subject, message = finding.subject, finding.message
    return f"{finding.severity}[{finding.code}] {subject}: {message}"


def _known_release(release: str) -> str | None:
    """A release that our rules know; None, the newest one, for a build without."""
    from spec_export.layout.releases import parse_release

    try:
        parse_release(release)
    except SpecExportError:
        logger.warning(
            "spec-export: SGLang calls itself %s; the rules of the newest release that "
            "is known are applied",
            release,
        )
        return None
    return release


def _served_target(
    path: str | None, folder: Path, worker: ThreadPoolExecutor
) -> Target | None:
    """The target with only the digests that matter, counted while the draft is read."""
    if path is None:
        return None
    from spec_export.artifact.manifest import Manifest
    from spec_export.artifact.target import open_target

    try:
        target = open_target(path)
        manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else None
    except SpecExportError as problem:
        # SGLang says itself what is wrong with a target; verify does with a manifest.
        logger.warning("spec-export: the target was not checked: %s", problem)
        return None
    digests: dict[Role, Future[str | None]] = {
        role: worker.submit(target.digest, role) for role in _roles(manifest)
    }

    def digest(role: Role) -> str | None:
        return digests[role].result() if role in digests else None

    target.digest = digest  # type: ignore[method-assign]
    return target


def _roles(manifest: Manifest | None) -> list[Role]:
    """What the draft takes from the target, and the norm, which costs nothing.

    A head of hundreds of MB that the export brings itself need not be the target's.
    """
    if manifest is None:
        return []
    taken: set[Role] = {entry.counterpart for entry in manifest.provided_by_target}
    return sorted(taken | {"norm"})
