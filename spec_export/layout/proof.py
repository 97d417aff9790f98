"""Proves a template when it is loaded: what can be known without a draft.

A template is data, and people send us templates; a slip in one would only show as
a draft that serves badly. So each is held against itself first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from packaging.version import InvalidVersion, Version

from spec_export.findings import CODES
from spec_export.layout.derive import prove_derived
from spec_export.layout.expressions import evaluate, fields, names
from spec_export.layout.targets import served_embedding
from spec_export.layout.template import (
    PLACEHOLDER,
    Expr,
    Loader,
    Template,
    TemplateError,
    Variable,
    choose,
    indices,
    pattern_regex,
)

# A name with its placeholders taken out; a rule is a name, never a regular expression.
_NAME = re.compile(r"[A-Za-z0-9_.]*")
# How the classes of the serving plug-in are called.
_OURS = "SpecExport"
# Which of the target's hooks each algorithm asks for its features.
_HOOKS = {"EAGLE3": "eagle3", "DFLASH": "dflash", "DSPARK": "dflash"}
# SGLang starts with all of them or with none.
_TOGETHER = {
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
}
_FROM_PLAN = {"layer_ids", "default_layer_ids", *served_embedding(None, "bfloat16")}


def prove(template: Template) -> None:
    """Prove what can be proved without a draft.

    Every word is known: names, placeholders, conditions, sentences, codes and
    releases. No two rules match one name. And over a grid of small configurations
    every written rule can be undone: no two source tensors get one export name, and
    the names and shapes written are those that the SGLang class takes from the
    export.

    Raises:
        TemplateError: with the rules and the configuration that contradict.
    """
    prove_rules(template)
    with _named(template):
        for values in _sample_grid(template):
            _prove_injective(template, values)


def prove_rules(template: Template) -> None:
    """The part of ``prove`` that every command can afford, without the grid.

    What the grid shows for small configurations, the accounting of a plan shows for
    the one at hand.

    Raises:
        TemplateError: as ``prove``.
    """
    with _named(template):
        _prove_words(template)
        _prove_serves(template)
        _prove_releases(template)
        _prove_deviations(template)
        for a, b in itertools.combinations(template.tensors, 2):
            if patterns_overlap(a.source, b.source):
                raise TemplateError(f"{a.source} and {b.source} match the same name")


@contextmanager
def _named(template: Template) -> Iterator[None]:
    """Put the template's name before what is wrong with it."""
    try:
        yield
    except ValueError as exc:  # also an expression outside the language
        raise TemplateError(f"{template.template}: {exc}") from exc


def _prove_serves(template: Template) -> None:
    """The launch line and config.json name the algorithm and the class of the file.

    The forward comparison cannot see either: it computes the class that config.json
    names, by the algorithm of that class.
    """
    serves = template.serves
    for flag, value in (
        ("--speculative-algorithm", serves.algorithm),
        ("--speculative-draft-model-path", "{draft}"),
    ):
        found = [
            after for word, after in itertools.pairwise(serves.launch) if word == flag
        ]
        if found != [value]:
            raise TemplateError(f"the launch line has {flag} {found}, not {value}")
    named = [rule.value for rule in template.config if rule.key == "architectures"]
    if named != ([] if serves.replaces else [[serves.architecture]]):
        raise TemplateError(
            f"config.json would name {named}, the class is {serves.architecture}"
        )
    if serves.plugin != serves.architecture.startswith(_OURS):
        raise TemplateError(f"plugin {serves.plugin} with {serves.architecture}")
    hook = None if template.capture is None else template.capture.hook
    if hook != _HOOKS.get(serves.algorithm):
        raise TemplateError(f"{serves.algorithm} has no capture by {hook}")
    together = sorted(_TOGETHER & set(serves.launch))
    if together and len(together) < len(_TOGETHER):
        raise TemplateError(f"the launch line has {together} without the others")


def _prove_releases(template: Template) -> None:
    """A parameter that came later has the feature that demands its release.

    The lowest release of an export is what the features demand.
    """
    demands = {str(f.when): f.since for f in template.features}
    for parameter in template.parameters:
        if parameter.since != demands.get(str(parameter.exists)):
            raise TemplateError(
                f"{parameter.name} is there since {parameter.since}, the feature "
                f"{parameter.exists} since {demands.get(str(parameter.exists))}"
            )


def _prove_deviations(template: Template) -> None:
    """What no comparison can see, because it is the same for both sides, is said."""
    codes = {refusal.code for refusal in template.refuse if refusal.severity == "error"}
    wanted = {"mtp-first-step"} if template.serves.algorithm == "NEXTN" else set()
    if any(derived.transform == "scale" for derived in template.derived):
        wanted.add("embedding-scale-rounded")
    if wanted - codes:
        raise TemplateError(f"nothing refuses {sorted(wanted - codes)}")


def _prove_words(template: Template) -> None:
    known = _prove_variables(template.variables)
    for expr, extra in _expressions(template):
        _known(expr, known | extra, "expression")
    for pattern, each in _patterns(template):
        _prove_pattern(template, pattern, each)
    argv = set(template.serves.launch)
    for flag in template.flags:
        argv |= set(flag.argv)
    for text in argv:
        _sentence(text, known | {"draft", "target"})
    for text in _texts(template):
        _sentence(text, known)
    if template.loader is not None:
        _prove_loader(template, template.loader)
    for code in _codes(template):
        if code not in CODES:
            raise TemplateError(f"{code!r} is no code of a finding")
    for release in _releases(template):
        try:
            Version(release)
        except InvalidVersion:
            raise TemplateError(f"{release!r} is no release") from None


def _prove_variables(variables: Mapping[str, Variable]) -> set[str]:
    """Each variable uses only those that stand before it; returns all names."""
    known: set[str] = set()
    for name, variable in variables.items():
        for expr in (variable.expr, variable.absent):
            _known(expr, known, f"in variable {name}; those before it are known")
        known.add(name)
    return known | _FROM_PLAN


def _prove_loader(template: Template, loader: Loader) -> None:
    """The loader's variables answer everything that it asks of the template."""
    known = _prove_variables(loader.variables)
    for parameter in template.parameters:
        asked = [parameter.exists, *parameter.shape, *parameter.each.values()]
        for expr in asked:
            _known(expr, known | set(parameter.each), f"loader, {parameter.name}")
    for own in loader.parameters:
        for expr in [own.exists, *own.shape, *own.each.values()]:
            _known(expr, known | set(own.each), f"loader, {own.name}")
    for bundle in loader.bundles:
        for expr in [*bundle.shape, *bundle.each.values()]:
            _known(expr, known, f"loader, {bundle.name}")
        for part in bundle.parts:
            _sentence(part, set(bundle.each))
    for refusal in loader.refuse:
        _known(refusal.when, known, "loader")
        for text in (refusal.message, refusal.hint):
            _sentence(text, known)
    for feature in loader.features:
        _known(feature.when, known, "loader")
        _sentence(feature.why, known)


def _known(expr: Expr | None, known: set[str], what: str) -> None:
    unknown = sorted(names(expr) - known) if expr is not None else []
    if unknown:
        raise TemplateError(f"{expr!r} uses unknown names {unknown} ({what})")


def _sentence(text: str, known: set[str]) -> None:
    unknown = sorted(fields(text) - known)
    if unknown:
        raise TemplateError(f"{text!r} uses unknown names {unknown}")


def _patterns(template: Template) -> Iterator[tuple[str, set[str]]]:
    for rule in template.tensors:
        yield rule.source, set(rule.each)
        yield from ((choice.is_, set(rule.each)) for choice in rule.export)
        if set(PLACEHOLDER.findall(rule.source)) != set(rule.each):
            raise TemplateError(
                f"{rule.source}: each is for {sorted(rule.each)}, the name needs others"
            )
    for derived in template.derived:
        for name in (derived.name, *derived.sources):
            yield name, set(derived.each)
    for parameter in template.parameters:
        yield parameter.name, set(parameter.each)


def _prove_pattern(template: Template, pattern: str, each: set[str]) -> None:
    if not _NAME.fullmatch(PLACEHOLDER.sub("", pattern)):
        raise TemplateError(
            f"{pattern!r} is no tensor name; a name has letters, digits, dots, "
            "underscores and {placeholders}, nothing is a regular expression"
        )
    unknown = sorted(set(PLACEHOLDER.findall(pattern)) - each - set(template.names))
    if unknown:
        raise TemplateError(f"{pattern!r} has unknown placeholders {unknown}")


def _texts(template: Template) -> Iterator[str]:
    for refusal in template.refuse:
        yield from (refusal.message, refusal.hint)
    yield from (feature.why for feature in template.features)
    for flag in template.flags:
        yield from (text for text in (flag.message, flag.note) if text is not None)


def _codes(template: Template) -> Iterator[str]:
    yield from (variable.missing for variable in template.variables.values())
    yield from (rule.deviation.code for rule in template.tensors if rule.deviation)
    yield from (refusal.code for refusal in template.refuse)
    if template.loader is not None:
        yield from (refusal.code for refusal in template.loader.refuse)
    yield from (flag.code for flag in template.flags if flag.code is not None)


def _releases(template: Template) -> Iterator[str]:
    yield template.serves.since
    yield from (feature.since for feature in template.features)
    yield from (p.since for p in template.parameters if p.since is not None)
    older = (variable.older for variable in template.variables.values())
    yield from (one.before for one in older if one is not None)
    for flag in template.flags:
        yield from (r for r in (flag.since, flag.before) if r is not None)
    if template.loader is not None:
        yield from (spelling.since for spelling in template.loader.spellings)
        yield from (feature.since for feature in template.loader.features)


def patterns_overlap(a: str, b: str) -> bool:
    """Whether one concrete name could match both source patterns."""
    left, right = a.split("."), b.split(".")
    if len(left) != len(right):
        return False
    return all(_segments_meet(x, y) for x, y in zip(left, right, strict=True))


def _segments_meet(x: str, y: str) -> bool:
    open_x, open_y = bool(PLACEHOLDER.search(x)), bool(PLACEHOLDER.search(y))
    if open_x and open_y:
        # An index is one or more characters, so what stands before and behind the
        # indices has to agree as far as both have it.
        head_x, head_y = PLACEHOLDER.split(x)[0], PLACEHOLDER.split(y)[0]
        tail_x, tail_y = PLACEHOLDER.split(x)[-1], PLACEHOLDER.split(y)[-1]
        heads = head_x.startswith(head_y) or head_y.startswith(head_x)
        return heads and (tail_x.endswith(tail_y) or tail_y.endswith(tail_x))
    if open_x:
        return pattern_regex(x).fullmatch(y) is not None
    if open_y:
        return pattern_regex(y).fullmatch(x) is not None
    return x == y


def _expressions(template: Template) -> Iterator[tuple[Expr, set[str]]]:
    for rule in template.tensors:
        extra = set(rule.each)
        yield from ((e, extra) for e in rule.each.values())
        yield from ((e, extra) for e in rule.shape or [])
        yield from ((c.when, extra) for c in rule.export)
        yield rule.exists, extra
    for derived in template.derived:
        extra = set(derived.each)
        spans = [*derived.each.values(), *derived.arguments.values(), *derived.shape]
        yield from ((e, extra) for e in spans)
        yield derived.when, set()
    for parameter in template.parameters:
        extra = set(parameter.each)
        yield from ((e, extra) for e in [*parameter.each.values(), *parameter.shape])
        yield parameter.exists, extra
    yield from ((r.when, set()) for r in template.refuse)
    yield from ((f.when, set()) for f in template.features)
    yield from ((f.when, set()) for f in template.flags)
    for config in template.config:
        yield config.when, set()
        yield (config.expr if config.expr is not None else True), set()


def _sample_grid(template: Template) -> Iterator[dict[str, Any]]:
    fixed: dict[str, Any] = {"layer_ids": [1, 2, 3], "default_layer_ids": False}
    fixed |= served_embedding(None, "bfloat16")
    free: dict[str, list[Any]] = {}
    if any("embedding_scale" in names(expr) for expr, _ in _expressions(template)):
        free["embedding_scale"] = [1.0, 1.5]
    for number, (name, variable) in enumerate(template.variables.items()):
        if variable.expr is not None:
            continue
        if variable.samples:
            free[name] = variable.samples
        else:
            fixed[name] = {
                "int": 101 + number,
                "bool": False,
                "str": "",
                "float": 1.5,
                "list": [],
            }[variable.type]
    for combination in itertools.product(*free.values()):
        values = {**fixed, **dict(zip(free, combination, strict=True))}
        for name, variable in template.variables.items():
            if variable.expr is not None:
                values[name] = evaluate(variable.expr, values)
        yield values


def _prove_injective(template: Template, values: dict[str, Any]) -> None:
    written: dict[str, tuple[str, list[Any]]] = {}
    sources: dict[str, list[Any]] = {}
    for rule in template.tensors:
        if not evaluate(rule.exists, values):
            continue
        for at in indices(rule.each, values):
            source = template.spell(rule.source, at)
            sources[source] = [evaluate(e, at) for e in rule.shape or []]
            if not rule.export:
                continue
            name = template.spell(choose(rule.export, at), at)
            if name in written and rule.invertible:
                raise TemplateError(
                    f"{source} and {written[name][0]} both become {name} with "
                    f"{_changed(template, values)}"
                )
            written[name] = source, sources[source]
    written |= prove_derived(template, values, sources)
    wanted = {
        template.spell(p.name, at): [evaluate(e, at) for e in p.shape]
        for p in template.parameters
        if p.origin == "export" and evaluate(p.exists, values)
        for at in indices(p.each, values)
    }
    if set(written) != set(wanted):
        raise TemplateError(
            f"written but not taken: {sorted(set(written) - set(wanted))}; taken but "
            f"not written: {sorted(set(wanted) - set(written))} with "
            f"{_changed(template, values)}"
        )
    for name, (source, shape) in written.items():
        if shape != wanted[name]:
            raise TemplateError(
                f"{source} has the shape {shape}, {name} takes {wanted[name]} with "
                f"{_changed(template, values)}"
            )


def _changed(template: Template, values: Mapping[str, Any]) -> str:
    names_ = [n for n, v in template.variables.items() if v.samples]
    return ", ".join(f"{n}={values[n]}" for n in names_)
