"""Where the names of a folder land in SGLang's class, release by release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from spec_export.layout.expressions import evaluate
from spec_export.layout.template import Loader, Template, indices


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
        lost: The parameters that those would set.
        bundled: Tensor that holds the parameters of all experts -> its shape.
    """

    wanted: dict[str, Wanted]
    landed: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    bundled: dict[str, tuple[int, ...]] = field(default_factory=dict)

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
        if loader.only is not None and loader.only not in name:
            continue
        meant, late = canonical(loader, name, release)
        special = next(
            (to for word, to in loader.contain.items() if word in name), None
        )
        if special is None and any(word in name for word in loader.ignored):
            continue
        parts = [special] if special is not None else _parts(loader, meant)
        bundle = _bundle(loader, meant, values) if special is None else None
        if bundle is not None:
            parts, result.bundled[name] = bundle
        late = late or next((newer[part] for part in parts if part in newer), None)
        if special is None and late is not None:
            result.late[name] = late
            result.lost.update(parts)
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


def _parts(loader: Loader, name: str) -> list[str]:
    for fused, parts in loader.fused.items():
        if name.endswith(fused):
            return [name.removesuffix(fused) + part for part in parts]
    return [name]


def _bundle(
    loader: Loader, name: str, values: Mapping[str, Any]
) -> tuple[list[str], tuple[int, ...]] | None:
    """The parameters that a tensor of all experts sets, and its shape."""
    for bundle in loader.bundles:
        if name.endswith(bundle.name):
            stem = name.removesuffix(bundle.name)
            parts = [
                stem + part.format_map(at)
                for at in indices(bundle.each, values)
                for part in bundle.parts
            ]
            return parts, tuple(int(evaluate(e, values)) for e in bundle.shape)
    return None
