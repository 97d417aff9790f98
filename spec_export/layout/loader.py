"""What SGLang's loader makes of a folder: which names land, drop or stay unset.

Pure: works on config.json, names and shapes. It is the check of folders that were
not written by us, and a second opinion on those that were.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.version import Version

from spec_export.findings import Finding, Severity, error, finding, info, warning
from spec_export.layout.config import flatten
from spec_export.layout.expressions import ExpressionError, evaluate, names
from spec_export.layout.template import Loader, Template, indices
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.variables import read_variables


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
        template.model_copy(update={"variables": loader.variables}), config, None, None
    )
    values |= {"layer_ids": [], "default_layer_ids": default_layer_ids}
    for item in loader.refuse:
        if not names(item.when) - set(values) and evaluate(item.when, values):
            findings.append(
                finding(
                    Severity(item.severity),
                    item.code,
                    item.subject,
                    item.message.format_map(values),
                    item.hint.format_map(values),
                )
            )
    late = [*_too_old(template, values, release), *_flags(template, values, release)]
    findings += [replace(f, subject=_key_of(f.subject, config)) for f in late]
    try:
        found = land(template, values, tensors, release)
    except (ExpressionError, KeyError, ValueError):
        return findings  # a size is missing; it has its own finding
    return findings + _names(template, found, tensors, release)


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


def _too_old(
    template: Template, values: Mapping[str, Any], release: Version
) -> list[Finding]:
    assert template.loader is not None
    out = []
    since = template.serves.since
    if Version(since) > release:
        out.append(
            error(
                "release-too-old",
                "architectures",
                f"{template.serves.architecture} reads this layout since {since}, "
                f"{release} was asked for",
                f"serve it with SGLang {since} or newer",
            )
        )
    for feature in [*template.features, *template.loader.features]:
        known = not names(feature.when) - set(values)
        if (
            known
            and evaluate(feature.when, values)
            and Version(feature.since) > release
        ):
            out.append(
                error(
                    "release-too-old",
                    feature.subject,
                    f"needs SGLang >= {feature.since}, {release} was asked for: "
                    f"{feature.why.format_map(values)}",
                    f"serve it with SGLang {feature.since} or newer",
                )
            )
    return out


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
        and not names(flag.when) - set(values)
        and evaluate(flag.when, values)
    ]


@dataclass(frozen=True)
class Wanted:
    """A parameter of the class: its shape, origin and, if unread, why.

    ``since`` is the first release that has it, if it is not the first of all.
    """

    shape: tuple[int, ...]
    origin: str
    reason: str | None = None
    since: str | None = None


@dataclass
class Landing:
    """What a release's loader does with the tensors of a folder.

    Attributes:
        wanted: The parameters, layers called ``layers.i`` in every release.
        landed: Parameter -> the tensors that set it, in the order of the files;
            the last one stays.
        dropped: Tensor that no parameter takes -> what it would mean.
        late: Tensor that this release drops -> the first one that takes it.
    """

    wanted: dict[str, Wanted]
    landed: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)

    @property
    def unset(self) -> list[str]:
        """Parameters that the export has to set and does not."""
        return [
            name
            for name, parameter in self.wanted.items()
            if parameter.origin == "export" and name not in self.landed
        ]


def land(
    template: Template,
    values: Mapping[str, Any],
    tensors: Iterable[str],
    release: Version,
) -> Landing:
    """Follow every name through a release's loader.

    Args:
        template: With a ``loader``.
        values: The loader's variables, read from the folder's config.json.
        tensors: Names, in the order in which they are loaded.
        release: The release.
    """
    loader = template.loader
    assert loader is not None
    every = _parameters(template, loader, values)
    newer = {n: w.since for n, w in every.items() if w.since is not None}
    newer = {n: since for n, since in newer.items() if Version(since) > release}
    result = Landing({n: w for n, w in every.items() if n not in newer})
    for name in tensors:
        meant, late = canonical(loader, name, release)
        special = next(
            (to for word, to in loader.contain.items() if word in name), None
        )
        if special is None and any(word in name for word in loader.ignored):
            continue
        parts = [special] if special is not None else _parts(loader, meant)
        late = late or next((newer[part] for part in parts if part in newer), None)
        if special is None and late is not None:
            result.late[name] = late
        elif any(part not in result.wanted for part in parts):
            result.dropped[name] = meant
        else:
            for part in parts:
                result.landed.setdefault(part, []).append(name)
    return result


def _parameters(
    template: Template, loader: Loader, values: Mapping[str, Any]
) -> dict[str, Wanted]:
    """The class's parameters for a configuration, layers called ``layers.i``."""
    plain = template.model_copy(update={"names": {}})
    out: dict[str, Wanted] = {}
    for parameter in template.parameters:
        if evaluate(parameter.exists, values):
            for at in indices(parameter.each, values):
                spelled = {**at, "layer": f"layers.{at.get('i', 0)}"}
                shape = tuple(int(evaluate(e, at)) for e in parameter.shape)
                name = plain.spell(parameter.name, spelled)
                out[name] = Wanted(shape, parameter.origin, since=parameter.since)
    for own in loader.parameters:
        if not evaluate(own.exists, values):
            continue
        for at in indices(own.each, values):
            name = plain.spell(own.name, at)
            shape = tuple(int(evaluate(e, at)) for e in own.shape)
            if own.origin == "absent":
                out.pop(name, None)
            elif own.origin != "unread" or name not in out:
                out[name] = Wanted(shape, own.origin, own.reason)
    return out


def canonical(loader: Loader, name: str, release: Version) -> tuple[str, str | None]:
    """A tensor name as the loader looks it up.

    Returns:
        The name with its prefix and legacy beginning resolved, and the release
        since which this spelling loads, if that is newer than ``release``.
    """
    late: str | None = None
    for spelling in loader.spellings:
        if spelling.prefix is not None and name.startswith(spelling.prefix):
            inner = name.removeprefix(spelling.prefix)
            if inner.startswith(tuple(spelling.not_before)):
                continue
            name = inner
            if Version(spelling.since) > release:
                late = spelling.since
    for spelling in loader.spellings:
        if spelling.begin is not None and name.startswith(spelling.begin):
            if Version(spelling.since) > release:
                late = spelling.since
            return (spelling.means or "") + name.removeprefix(spelling.begin), late
    return name, late


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
                f"serve it with SGLang {since} or newer, or export it again "
                f"with --sglang {release}",
            )
        )
    for name, meant in found.dropped.items():
        near = difflib.get_close_matches(meant, found.wanted, n=1, cutoff=0.5)
        findings.append(
            error(
                "name-dropped",
                name,
                f"{architecture} has no parameter of this name and drops it "
                "silently" + (f"; the nearest is {near[0]}" if near else ""),
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
        findings += _shape(name, tensors[name], shapes)
    for name in found.unset:
        findings.append(
            error(
                "tensor-missing",
                _as_in_folder(name, template.loader, tensors),
                f"no tensor sets it; {architecture} leaves it "
                + ("at ones" if "norm" in name else "uninitialised")
                + " without a word",
                "export the draft again from its checkpoint",
            )
        )
    return findings


def _parts(loader: Loader, name: str) -> list[str]:
    for fused, parts in loader.fused.items():
        if name.endswith(fused):
            return [name.removesuffix(fused) + part for part in parts]
    return [name]


def _shape(
    name: str, tensor: TensorInfo, shapes: list[tuple[int, ...]]
) -> list[Finding]:
    rows = sum(s[0] for s in shapes) if shapes[0] else 0
    wanted = (rows, *shapes[0][1:]) if shapes[0] else ()
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
