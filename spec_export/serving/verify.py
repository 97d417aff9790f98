"""The deployer's check: is this folder what it says, and does it fit the target?

No torch here; the forward comparison is added by the caller. What reads values or
templates is imported where it is used: ``--files-only`` takes little longer than
hashing the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export.artifact.manifest import MANIFEST_NAME, Leg, Manifest
from spec_export.artifact.verify_files import verify_files
from spec_export.findings import (
    CODES,
    Finding,
    Severity,
    SpecExportError,
    apply_allow,
    error,
    explains_difference,
    has_errors,
    info,
    usage_error,
    warning,
)

if TYPE_CHECKING:
    from packaging.version import Version

    from spec_export.artifact.target import Role, Target


@dataclass
class VerifyResult:
    """What ``spec-export verify`` says.

    Attributes:
        status: That of the manifest, or ``no manifest``.
        verdict: That of the recorded layout leg: ``pass``, ``fail``, ``not run``;
            the last where the files are not those that were compared.
        findings: What was found; an error means do not serve it.
        manifest: The manifest, if there is one.
    """

    status: str
    verdict: str
    findings: list[Finding] = field(default_factory=list)
    manifest: Manifest | None = None


def verify(
    folder: Path,
    target: Target | None = None,
    *,
    sglang: str | None = None,
    allow: tuple[str, ...] = (),
    files_only: bool = False,
) -> VerifyResult:
    """Check a draft folder.

    Args:
        folder: An export, or any draft folder for SGLang.
        target: The target that will be served.
        sglang: The release that will load it; the newest known one by default.
        allow: Codes accepted by name.
        files_only: Only whether the files are the manifest's.

    Returns:
        Status, recorded verdict and findings.

    Raises:
        SpecExportError: exit 2 where there is no folder or no model in it, exit 1
            for files that cannot be read.
    """
    if not folder.is_dir():
        raise usage_error("path-missing", folder.name, f"{folder} is not a folder")
    findings: list[Finding] = []
    if sglang is not None or not files_only:
        from spec_export.layout.releases import parse_release

        release, findings = parse_release(sglang)
    findings += path_findings(folder)
    manifest = _manifest(folder, target, files_only, findings)
    whole = True
    if manifest is not None:
        wrong = verify_files(folder, manifest)
        whole = not has_errors(wrong)
        findings += [*wrong, *_status(manifest), *_claims(manifest)]
        findings += _accepted(manifest)
        if not files_only:
            findings += release_findings(manifest, release)
            findings += target_findings(manifest, target)
    # What leads out of the folder is not followed.
    if not files_only and not any(f.code == "path-escape" for f in findings):
        try:
            from spec_export.serving.contents import contents_findings

            found = contents_findings(folder, target, release)
            findings = [f for f in findings if not _sharper(f, found)] + found
        except SpecExportError as problem:
            if not has_errors(findings):
                raise
            # What is wrong with the files says already why they cannot be read.
            told = {f.subject for f in findings if f.severity is Severity.ERROR}
            findings += [f for f in problem.findings if f.subject not in told]
    leg = manifest.comparison.get("layout") if manifest is not None else None
    if not whole:
        leg = None  # what was compared is not what lies here
    return VerifyResult(
        manifest.status if manifest is not None else "no manifest",
        (leg.verdict if leg is not None else None) or "not run",
        apply_allow(findings, allow),
        manifest,
    )


def _sharper(finding: Finding, found: list[Finding]) -> bool:
    """Whether the folder itself says what needs the release that the manifest names."""
    return finding.code == "release-too-old" and any(
        f.code == finding.code and (finding.hint or "").startswith(f.hint or "?")
        for f in found
    )


def path_findings(folder: Path) -> list[Finding]:
    """SGLang chooses a Mistral parser by the words in a path (mistral_utils.py)."""
    path = str(folder.resolve()).lower()
    if "eagle" in path and "mistral" in path:
        return [
            warning(
                "path-mistral",
                folder.name,
                'the path holds "eagle" and "mistral": SGLang parses the folder as a '
                "native Mistral one and fails",
                "rename the folder",
            )
        ]
    return []


def _manifest(
    folder: Path, target: Target | None, files_only: bool, findings: list[Finding]
) -> Manifest | None:
    if (folder / MANIFEST_NAME).exists():
        return Manifest.read(folder)
    if files_only:
        return Manifest.read(folder)  # raises: there is nothing to compare with
    with_target = "" if target is None else ", against the target too"
    findings.append(
        info(
            "manifest-missing",
            MANIFEST_NAME,
            "the folder was not written by spec-export: names, shapes, config and "
            f"token map were checked{with_target}; what was trained, which target it "
            "was trained with and whether the bytes are whole could not be",
            "ask for an export with a manifest",
        )
    )
    return None


def _status(manifest: Manifest) -> list[Finding]:
    if manifest.status == "failed":
        return [
            error(
                "export-failed-status",
                MANIFEST_NAME,
                "the forward comparison of this export failed when it was written",
                "do not serve it; its manifest says in which tensor it differs",
            )
        ]
    if manifest.status == "saved":
        return [
            info(
                "export-saved",
                MANIFEST_NAME,
                "saved in training and not finalized",
                "spec-export finalize adds comparison, model card and launch line",
            )
        ]
    return []


def _accepted(manifest: Manifest) -> list[Finding]:
    """What is known not to be as trained, for those who did not accept it."""
    out = []
    for deviation in manifest.deviations:
        subject, _, message = deviation.detail.partition(": ")
        # Which target is served is for the deployer to say again.
        if deviation.code in CODES and deviation.code != "target-differs":
            hint = "accepted by name when the export was written"
            out.append(warning(deviation.code, subject, message, hint))
    return out


def _claims(manifest: Manifest) -> list[Finding]:
    """A recorded verdict that its own numbers contradict: edited, or not ours."""
    out = []
    accepted = {d.code for d in manifest.deviations}
    for name, leg in manifest.comparison.items():
        subject, hint = f"comparison.{name}", "repeat it: verify --compare --target DIR"
        if leg.verdict == "fail" and manifest.status != "failed":
            if not explains_difference(name, accepted):
                message = f"failed, but the status is {manifest.status}"
                out.append(error("manifest-invalid", subject, message, hint))
            continue
        if leg.verdict != "pass":
            continue
        allowed = _number(leg.tolerance, "max_rel")
        found = _differences(name, leg)
        if not leg.ran or allowed is None or not found or None in found:
            message = "says pass without the numbers that a comparison has"
            out.append(error("manifest-invalid", subject, message, hint))
        elif max(n for n in found if n is not None) > allowed:
            message = f"says pass with a difference above its tolerance {allowed:.2e}"
            out.append(error("manifest-invalid", subject, message, hint))
    return out


def _differences(name: str, leg: Leg) -> list[float | None]:
    """What a leg measured, as shares of the logit range: per step, or per prompt."""
    held, key = leg.metrics, "max_rel"
    if name == "engine":
        prompts = leg.prompts if isinstance(leg.prompts, list) else []
        held = [p for p in prompts if not isinstance(p, dict) or p.get("counted")]
        key = "closest"
    return [_number(one, key) for one in held] if isinstance(held, list) else []


def _number(held: Any, key: str) -> float | None:
    value = held.get(key) if isinstance(held, dict) else None
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain else None


def release_findings(manifest: Manifest, release: Version) -> list[Finding]:
    """Whether a release serves an export, and with what."""
    from packaging.version import Version

    from spec_export.layout.loader import serve_with

    serving = manifest.serving
    out = []
    try:
        too_old = Version(serving.min_version) > release
    except ValueError:
        return [
            error(
                "manifest-invalid",
                "serving.min_version",
                f"{serving.min_version!r} is no SGLang release",
            )
        ]
    if too_old:
        out.append(
            error(
                "release-too-old",
                "serving.min_version",
                f"the export needs SGLang >= {serving.min_version} "
                f"({'; '.join(serving.reasons)}), {release} was asked for",
                f"{serve_with(serving.min_version)}, or export it again with --sglang "
                f"{release}",
            )
        )
    if serving.requires_plugin:
        out.append(
            info(
                "plugin-required",
                "serving.requires_plugin",
                f"{serving.architecture} is a class of the spec-export plug-in; a "
                "stock server refuses the folder",
                "pip install spec-export on the server",
            )
        )
    return out


def target_findings(manifest: Manifest, target: Target | None) -> list[Finding]:
    """Whether a target is the one of the training, by its digests."""
    if target is None:
        return []
    if not target.has_weights:
        return [
            warning(
                "target-weights-missing",
                target.name,
                "the target's weights are not at hand: whether it is the one of the "
                "training was not checked",
                "give a folder with its weights: --target DIR",
            )
        ]
    recorded = manifest.target_model.digests
    for role in ("embedding", "head", "norm"):
        wanted = getattr(recorded, role) or _as_trained(manifest, target, role)
        found = target.digest(role)
        if wanted is not None and found is not None and wanted != found:
            return [
                error(
                    "target-differs",
                    f"target {role}",
                    f"its SHA-256 is {found[:12]}..., the draft was trained with "
                    f"{wanted[:12]}... ({manifest.target_model.name})",
                    "serve the target of the training, or --allow target-differs for "
                    "a fine-tuned or quantised one of the same shape",
                )
            ]
    return []


def _as_trained(manifest: Manifest, target: Target, role: Role) -> str | None:
    """The digest of what training used, where the export saw no target weights.

    It was taken at the saved dtype, so it says something about a target of that dtype.
    """
    tensor = target.find(role)
    for provided in manifest.provided_by_target:
        if (
            tensor is not None
            and provided.counterpart == role
            and provided.dtype == tensor.dtype
            and tuple(provided.shape) == tensor.shape
        ):
            return provided.sha256
    return None
