"""What SGLang's loader makes of a folder: which names land, drop or stay unset.

Pure: works on config.json, names and shapes. It is the check of folders that were
not written by us, and a second opinion on those that were.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from packaging.version import Version

from spec_export.findings import Finding, error, info, warning
from spec_export.layout.conditions import holds, refused
from spec_export.layout.config import flatten
from spec_export.layout.expressions import ExpressionError
from spec_export.layout.landing import Landing, land
from spec_export.layout.targets import language_model
from spec_export.layout.template import Feature, Loader, Template
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.variables import read_variables

_MANY = 8  # names that differ in a number are told one by one up to here


def check_folder(
    template: Template,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    release: Version,
    default_layer_ids: bool = True,
) -> list[Finding]:
    """Compare a folder with what the release's loader takes.

    Args:
        template: That of the folder's class, with a ``loader``.
        config: The folder's config.json.
        tensors: Its tensors.
        release: The SGLang release that will load it.
        default_layer_ids: Whether its layer ids are the target's default set.

    Returns:
        Findings; subjects are names and keys of the folder.
    """
    assert template.loader is not None
    loader = template.loader
    values, findings = read_variables(
        template.model_copy(update={"variables": loader.variables}),
        text_part(config),
        None,
        None,
    )
    findings = [replace(f, subject=_key_of(f.subject, config)) for f in findings]
    if loader.only is not None and not any(loader.only in name for name in tensors):
        return [
            *findings,
            error(
                "tensor-missing",
                f"{loader.only}.*",
                f"no tensor has {loader.only} in its name, and "
                f"{template.serves.architecture} reads no others",
                "is this a draft? a target without such tensors is none",
            ),
        ]
    values |= {"layer_ids": [], "default_layer_ids": default_layer_ids}
    findings += refused(loader.refuse, values)
    lacking = _lacking(template, values, release)
    late = _too_old(template, values, release, lacking)
    late += _flags(template, values, release)
    findings += [replace(f, subject=_key_of(f.subject, config)) for f in late]
    try:
        found = land(template, values, tensors, release)
    except (ExpressionError, KeyError, ValueError):
        return findings  # a size is missing; it has its own finding
    # Names that a missing feature takes away are no news beside it.
    told = {feature.since for feature in lacking}
    found.late = {n: since for n, since in found.late.items() if since not in told}
    return findings + _names(template, found, tensors, release)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the keys of its language model at the top."""
    return {**config, **language_model(config)}


def _key_of(subject: str, config: Mapping[str, Any]) -> str:
    """Where a folder's config.json holds what a source calls by this key."""
    last = subject.rpartition(".")[2]
    held = (key for key in flatten(config) if key.rpartition(".")[2] == last)
    return next(held, last)


def _as_in_folder(name: str, loader: Loader, tensors: Iterable[str]) -> str:
    """A name that is missing, in the spelling that the folder's others have."""
    for spelling in loader.spellings:
        begin, means = spelling.begin or "", spelling.means or ""
        used = any(begin and held.startswith(begin) for held in tensors)
        if used and means and name.startswith(means):
            return begin + name.removeprefix(means)
    return name


def _lacking(
    template: Template, values: Mapping[str, Any], release: Version
) -> list[Feature]:
    """What the folder needs and the release does not have."""
    assert template.loader is not None
    return [
        feature
        for feature in [*template.features, *template.loader.features]
        if Version(feature.since) > release and holds(feature.when, values)
    ]


def _too_old(
    template: Template,
    values: Mapping[str, Any],
    release: Version,
    lacking: Iterable[Feature],
) -> list[Finding]:
    out = []
    since = template.serves.since
    if Version(since) > release:
        out.append(
            error(
                "release-too-old",
                "architectures",
                f"{template.serves.architecture} reads this layout since {since}, "
                f"{release} was asked for",
                serve_with(since),
            )
        )
    for feature in lacking:
        out.append(
            error(
                "release-too-old",
                feature.subject,
                f"needs SGLang >= {feature.since}, {release} was asked for: "
                f"{feature.why.format_map(values)}",
                serve_with(feature.since),
            )
        )
    return out


def serve_with(since: str) -> str:
    """What to do about a folder that needs a release."""
    return f"serve it with SGLang {since} or newer"


def _flags(
    template: Template, values: Mapping[str, Any], release: Version
) -> list[Finding]:
    """Server flags that only releases as old as this one need."""
    return [
        warning(
            flag.code,
            flag.subject or "",
            (flag.message or "").format_map(values),
            f"start the server with {' '.join(flag.argv)}",
        )
        for flag in template.flags
        if flag.code is not None
        and flag.before is not None
        and Version(flag.before) > release
        and holds(flag.when, values)
    ]


def _names(
    template: Template,
    found: Landing,
    tensors: Mapping[str, TensorInfo],
    release: Version,
) -> list[Finding]:
    assert template.loader is not None
    architecture = template.serves.architecture
    findings: list[Finding] = []
    for name, since in found.late.items():
        findings.append(
            error(
                "name-dropped",
                name,
                f"SGLang {release} drops this name silently; it loads since {since}",
                f"{serve_with(since)}, or export it again with --sglang {release}",
            )
        )
    becomes = "drops it silently"
    if template.loader.unknown == "refused":
        becomes = "fails to load (KeyError)"
    for name, more in _told(found.dropped):
        near = difflib.get_close_matches(
            found.dropped[name], found.wanted, n=1, cutoff=0.5
        )
        findings.append(
            error(
                "name-dropped",
                name,
                f"{architecture} has no parameter of this name and {becomes}"
                + (f"; the nearest is {near[0]}" if near else "")
                + more,
                "rename it, or remove it if the draft does not need it",
            )
        )
    wanted_shapes: dict[str, list[tuple[int, ...]]] = {}
    for part, names_ in found.landed.items():
        wanted = found.wanted[part]
        for name in names_:
            wanted_shapes.setdefault(name, []).append(wanted.shape)
            if wanted.origin == "target":
                findings.append(
                    info(
                        "embedding-only-in-target",
                        name,
                        "SGLang replaces it by the target's",
                        "leave it out",
                    )
                )
            if wanted.origin == "unread":
                findings.append(
                    error(
                        "name-dropped",
                        name,
                        f"is loaded and never used: {wanted.reason}",
                        "export the draft again from its checkpoint",
                    )
                )
        for earlier, later in itertools.pairwise(names_):
            findings.append(
                error(
                    "file-contradiction",
                    later,
                    f"and {earlier} both load into {part}; the last one wins",
                    "keep one of them",
                )
            )
    for name, shapes in wanted_shapes.items():
        whole = found.bundled.get(name)
        findings += _shape(name, tensors[name], shapes, whole)
    for name, more in _told(n for n in found.unset if n not in found.lost):
        findings.append(
            error(
                "tensor-missing",
                _as_in_folder(name, template.loader, tensors),
                f"no tensor sets it; {architecture} leaves it "
                + ("at ones" if "norm" in name else "uninitialised")
                + f" without a word{more}",
                "export the draft again from its checkpoint",
            )
        )
    return findings


def _told(names_: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Names; of many that differ in numbers only the first, and what it stands for."""
    groups: dict[str, list[str]] = {}
    for name in names_:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for alike in groups.values():
        if len(alike) <= _MANY:
            yield from ((name, "") for name in alike)
        else:
            yield alike[0], f"; so for {len(alike)} names, up to {alike[-1]}"


def _shape(
    name: str,
    tensor: TensorInfo,
    shapes: list[tuple[int, ...]],
    whole: tuple[int, ...] | None,
) -> list[Finding]:
    rows = sum(s[0] for s in shapes) if shapes[0] else 0
    wanted = whole or ((rows, *shapes[0][1:]) if shapes[0] else ())
    if tensor.shape == wanted:
        return []
    return [
        error(
            "shape-mismatch",
            name,
            f"has the shape {list(tensor.shape)}, config.json says {list(wanted)}",
            "the tensor or config.json belongs to another draft",
        )
    ]
