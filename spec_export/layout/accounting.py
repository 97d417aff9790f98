"""Total accounting: each source tensor has one fate, each parameter one origin.

SGLang's loaders drop what they do not know and leave unset what they do not get,
so anything here that does not add up is an error that names the tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spec_export.findings import Finding, error
from spec_export.layout.derive import derive
from spec_export.layout.expressions import evaluate, names
from spec_export.layout.plan_types import Fate, FromTarget, Placement
from spec_export.layout.template import (
    Template,
    TensorRule,
    choose,
    indices,
    pattern_regex,
    span,
)
from spec_export.layout.tensors import TensorInfo


@dataclass
class Accounts:
    """What the rules make of a source's tensors."""

    placements: list[Placement] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    from_target: list[FromTarget] = field(default_factory=list)
    nonzero: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def expected_tensors(
    template: Template, values: Mapping[str, Any], optional: bool = True
) -> dict[str, TensorInfo]:
    """The tensors that speculators saves for a configuration, by the rules.

    Args:
        template: Whose rules.
        values: Variables.
        optional: Whether tensors that a slim checkpoint lacks are included.

    Returns:
        Name to tensor; floats are listed as BF16, what speculators saves.
    """
    dtypes = {"float": "BF16", "int64": "I64", "bool": "BOOL"}
    out = {}
    for rule in template.tensors:
        if rule.source.startswith("verifier_") or (rule.optional and not optional):
            continue
        if evaluate(rule.exists, values):
            for at in indices(rule.each, values):
                name = template.spell(rule.source, at)
                out[name] = TensorInfo(name, dtypes[rule.kind], _shape(rule, at))
    return out


def account(
    template: Template,
    tensors: Mapping[str, TensorInfo],
    values: Mapping[str, Any],
    target_head: str,
) -> Accounts:
    """Give each tensor its fate and each parameter its origin.

    Args:
        template: The rules.
        tensors: What the source holds.
        values: Variables of the template.
        target_head: ``own``, ``tied``, ``packed`` or ``missing``: what the target
            could give in place of a head that the source lacks.

    Returns:
        The accounts; everything that does not add up is an error finding in them.
    """
    accounts = Accounts()
    seen: set[str] = set()
    for name, info in tensors.items():
        found = _match(template, name, values)
        if found is None:
            accounts.findings.append(_unaccounted(template, name, values))
            continue
        rule, at = found
        if at is None:
            accounts.findings.append(_unexpected(template, rule, name, values))
            continue
        seen.add(name)
        _place(template, rule, at, info, accounts)
    for rule in template.tensors:
        if evaluate(rule.exists, values):
            for at in indices(rule.each, values):
                name = template.spell(rule.source, at)
                if name not in seen and name not in tensors:
                    _absent(template, rule, at, name, target_head, accounts)
    accounts.placements, accounts.fates, problems = derive(
        template, tensors, values, accounts.placements, accounts.fates
    )
    accounts.findings += problems
    _origins(template, tensors, values, accounts)
    return accounts


def _match(
    template: Template, name: str, values: Mapping[str, Any]
) -> tuple[TensorRule, dict[str, Any] | None] | None:
    """The rule of a name; its indices are None when the rule is out of force."""
    for rule in template.tensors:
        match = pattern_regex(rule.source).fullmatch(name)
        if match is None:
            continue
        if not evaluate(rule.exists, values):
            return rule, None
        at: dict[str, Any] = dict(values)
        for index, text in match.groupdict().items():
            allowed = {str(v): v for v in span(rule.each[index], values)}
            if text not in allowed:
                return rule, None
            at[index] = allowed[text]
        return rule, at
    return None


def _shape(rule: TensorRule, at: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(evaluate(e, at)) for e in rule.shape or [])


def _place(
    template: Template,
    rule: TensorRule,
    at: Mapping[str, Any],
    info: TensorInfo,
    accounts: Accounts,
) -> None:
    wanted = _shape(rule, at)
    if info.shape != wanted:
        formula = ", ".join(str(e) for e in rule.shape or [])
        accounts.findings.append(
            error(
                "shape-mismatch",
                info.name,
                f"has the shape {list(info.shape)}, the configuration says "
                f"{list(wanted)} = [{formula}]{_sizes(template, rule, at)}",
                "the tensor or the configuration belongs to another draft",
            )
        )
    problem = _kind_problem(rule, info)
    if problem is not None:
        accounts.findings.append(problem)
    to: tuple[str, ...] = ()
    if rule.export:
        to = (template.spell(choose(rule.export, at), at),)
        accounts.placements.append(
            Placement(
                name=to[0],
                sources=(info.name,),
                transform=None,
                shape=info.shape,
                kind=rule.kind,
                role_hint=rule.role,
                vocab_axis=rule.vocab_axis,
                counterpart=rule.counterpart,
            )
        )
    if rule.deviation is not None:
        accounts.findings.append(
            error(
                rule.deviation.code, info.name, rule.reason or "", rule.deviation.hint
            )
        )
    if rule.nonzero:
        accounts.nonzero.append(info.name)
    accounts.fates.append(
        Fate(info.name, info.shape, rule.fate, to, rule.reason, rule.counterpart)
    )


def _sizes(template: Template, rule: TensorRule, at: Mapping[str, Any]) -> str:
    """The meaning of the letters in a shape formula, for a message."""
    words = []
    for name in sorted({n for expr in rule.shape or [] for n in names(expr)}):
        variable = template.variables.get(name)
        if variable is not None:
            words.append(f"{name} = {at[name]} ({variable.origin})")
    return "".join(f", {word}" for word in words)


def _kind_problem(rule: TensorRule, info: TensorInfo) -> Finding | None:
    if rule.kind == "float" and not info.is_float:
        return error(
            "dtype-unsupported",
            info.name,
            f"has the dtype {info.dtype}, a plain float weight is needed",
            "export from the unquantised checkpoint",
        )
    integers = ("I64", "I32")
    if rule.kind == "int64" and info.dtype not in integers:
        return error(
            "vocab-map-invalid",
            info.name,
            f"has the dtype {info.dtype}, offsets are I64",
            "restore the map from the d2t file of the training data",
        )
    if rule.kind == "bool" and info.dtype not in ("BOOL", "U8", *integers):
        return error(
            "vocab-map-invalid",
            info.name,
            f"has the dtype {info.dtype}, a membership mask is BOOL",
            "restore the map from the t2d file of the training data",
        )
    return None


def _unexpected(
    template: Template, rule: TensorRule, name: str, values: Mapping[str, Any]
) -> Finding:
    if rule.flag is not None and not evaluate(rule.exists, values):
        what = f"is present, although {_said(template, rule, values)}"
        hint = f"set {rule.flag} as in training, or remove the tensor"
    else:
        what = "is present, although the configuration has no such layer or part"
        hint = "the tensor or the configuration belongs to another draft"
    return error("tensor-unexpected", name, f"{what} (rule {rule.source})", hint)


def _said(template: Template, rule: TensorRule, values: Mapping[str, Any]) -> str:
    """The flag of a rule and what it says: ``norm_before_fc false``."""
    for name, variable in template.variables.items():
        if variable.source == rule.flag and name in values:
            value = values[name]
            text = str(value).lower() if isinstance(value, bool) else str(value)
            return f"{rule.flag} is {text}"
    return f"{rule.flag} says so"


def _absent(
    template: Template,
    rule: TensorRule,
    at: Mapping[str, Any],
    name: str,
    target_head: str,
    accounts: Accounts,
) -> None:
    if rule.fill is not None:
        _fill(template, rule, at, name, target_head, accounts)
    elif not rule.optional:
        why = "the configuration needs it"
        if rule.flag is not None:
            why = _said(template, rule, at)
        accounts.findings.append(
            error(
                "tensor-missing",
                name,
                f"is not in the checkpoint; {why}",
                "the checkpoint is not complete, or its configuration is another's",
            )
        )


def _fill(
    template: Template,
    rule: TensorRule,
    at: Mapping[str, Any],
    name: str,
    target_head: str,
    accounts: Accounts,
) -> None:
    """A slim checkpoint leaves out what the target owns; take it from there."""
    if target_head in ("own", "tied"):
        accounts.placements.append(
            Placement(
                name=template.spell(choose(rule.export, at), at),
                sources=(f"target:{rule.fill}",),
                transform=None,
                shape=_shape(rule, at),
                kind=rule.kind,
                vocab_axis=rule.vocab_axis,
                counterpart=rule.counterpart,
            )
        )
        return
    code, why = "target-needed", "the target's weights are not at hand"
    if target_head == "packed":
        code, why = "head-packed", "the target's head is packed or quantised"
    accounts.findings.append(
        error(
            code,
            name,
            f"is not in the checkpoint and has to come from the target; {why}",
            "give the unquantised target's folder with --target DIR",
        )
    )


def _unaccounted(template: Template, name: str, values: Mapping[str, Any]) -> Finding:
    known: list[str] = list(expected_tensors(template, values))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return error(
        "tensor-unaccounted",
        name,
        f"no rule of the template {template.template} takes it"
        + (f"; the nearest known name is {near[0]}" if near else ""),
        "rename it in the checkpoint, or remove it if it is not part of the draft",
    )


def _origins(
    template: Template,
    tensors: Iterable[str],
    values: Mapping[str, Any],
    accounts: Accounts,
) -> None:
    placed = {p.name: p for p in accounts.placements}
    used = {
        f.counterpart: f.source
        for f in accounts.fates
        if f.fate == "provided_by_target" and f.counterpart is not None
    }
    for parameter in template.parameters:
        if not evaluate(parameter.exists, values):
            continue
        for at in indices(parameter.each, values):
            name = template.spell(parameter.name, at)
            shape = tuple(int(evaluate(e, at)) for e in parameter.shape)
            if parameter.origin == "target":
                assert parameter.counterpart is not None
                source = used.get(parameter.counterpart)
                accounts.from_target.append(
                    FromTarget(name, shape, parameter.counterpart, source)
                )
                continue
            placement = placed.pop(name, None)
            if placement is None:
                if not accounts.findings:
                    accounts.findings.append(
                        error(
                            "parameter-without-origin",
                            name,
                            f"{template.serves.architecture} would leave it unset",
                            "the checkpoint is not complete",
                        )
                    )
            elif placement.shape != shape and not accounts.findings:
                accounts.findings.append(
                    error(
                        "shape-mismatch",
                        placement.key,
                        f"would be written as {name} with the shape "
                        f"{list(placement.shape)}, the class has {list(shape)}",
                    )
                )
    for name, placement in placed.items():
        accounts.findings.append(
            error(
                "tensor-unaccounted",
                placement.key,
                f"would be written as {name}, which no parameter of "
                f"{template.serves.architecture} takes",
            )
        )
