"""Tensors that named transforms compute: which are written, from what, how large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spec_export.findings import Finding, error
from spec_export.layout.expressions import evaluate
from spec_export.layout.plan_types import Fate, Placement
from spec_export.layout.template import Derived, Template, TemplateError, indices
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.transforms import TransformError, result_shape


def derived_in_force(
    template: Template, values: Mapping[str, Any]
) -> Iterator[tuple[Derived, str, dict[str, Any]]]:
    """Each tensor to compute: its rule, its name and the indices it holds for."""
    for rule in template.derived:
        if evaluate(rule.when, values):
            for at in indices(rule.each, values):
                yield rule, template.spell(rule.name, at), at


def derive(
    template: Template,
    tensors: Mapping[str, TensorInfo],
    values: Mapping[str, Any],
    placements: Sequence[Placement],
    fates: Sequence[Fate],
) -> tuple[list[Placement], list[Fate], list[Finding]]:
    """Add the computed tensors to what is written.

    Args:
        template: The rules.
        tensors: What the source holds.
        values: Variables of the template.
        placements: The renamed tensors.
        fates: Of the source tensors.

    Returns:
        Placements, where a computed tensor stands in for a renamed one of its name;
        fates, where what a transform takes is ``transformed``; and an error for a
        ``transformed`` tensor that no transform took.
    """
    out = {placement.name: placement for placement in placements}
    told = {fate.source: fate for fate in fates}
    used: dict[str, list[str]] = {}
    for rule, name, at in derived_in_force(template, values):
        sources = tuple(template.spell(source, at) for source in rule.sources)
        if any(source not in tensors for source in sources):
            continue  # tensor-missing says so
        arguments = {key: evaluate(e, at) for key, e in rule.arguments.items()}
        out[name] = Placement(
            name=name,
            sources=sources,
            transform=rule.transform,
            shape=tuple(int(evaluate(e, at)) for e in rule.shape),
            role_hint="derived",
            arguments=arguments,
        )
        for source in sources:
            used.setdefault(source, []).append(name)
    for source, names in used.items():
        if source in told:  # tensor-unaccounted says so of others
            told[source] = replace(
                told[source], fate="transformed", to=tuple(names), reason=None
            )
    problems = [
        error(
            "tensor-unaccounted",
            fate.source,
            f"no transform of the template {template.template} takes it",
        )
        for fate in told.values()
        if fate.fate == "transformed" and not fate.to
    ]
    return list(out.values()), list(told.values()), problems


def prove_derived(
    template: Template,
    values: Mapping[str, Any],
    sources: Mapping[str, Sequence[int]],
) -> dict[str, tuple[str, list[int]]]:
    """Hold the transforms of a template against one configuration.

    Args:
        template: The rules.
        values: The configuration.
        sources: Shape of each source tensor that it has.

    Returns:
        Export name to a description of its origin and its shape.

    Raises:
        TemplateError: an unknown source or transform, arguments or shapes that do
            not fit, two transforms that write one name, or a ``transformed`` tensor
            that none takes.
    """
    out: dict[str, tuple[str, list[int]]] = {}
    used: set[str] = set()
    for rule, name, at in derived_in_force(template, values):
        taken = [template.spell(source, at) for source in rule.sources]
        unknown = [source for source in taken if source not in sources]
        if unknown:
            raise TemplateError(f"{name} is made of {unknown[0]}, which is not there")
        if name in out:
            raise TemplateError(f"two transforms write {name}")
        shape = [int(evaluate(e, at)) for e in rule.shape]
        arguments = {key: evaluate(e, at) for key, e in rule.arguments.items()}
        try:
            found = result_shape(
                rule.transform, [tuple(sources[s]) for s in taken], arguments
            )
        except TransformError as exc:
            raise TemplateError(f"{name}: {exc}") from exc
        if found is not None and list(found) != shape:
            raise TemplateError(
                f"{name}: {rule.transform} gives {list(found)}, the rule says {shape}"
            )
        out[name] = (f"{rule.transform} of {', '.join(taken) or 'nothing'}", shape)
        used |= set(taken)
    for tensor in template.tensors:
        if tensor.fate == "transformed" and evaluate(tensor.exists, values):
            for at in indices(tensor.each, values):
                if (source := template.spell(tensor.source, at)) not in used:
                    raise TemplateError(f"no transform takes {source}")
    return out
