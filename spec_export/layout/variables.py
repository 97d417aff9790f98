"""The values that a template's expressions may use, read from configurations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from spec_export.findings import Finding, error
from spec_export.layout.expressions import ExpressionError, evaluate
from spec_export.layout.template import Template, Variable

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "float": (int, float),
    "list": (list,),
}


def dig(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key (list positions as numbers), None where absent."""
    here: Any = config
    for part in key.split("."):
        if isinstance(here, Mapping):
            here = here.get(part)
        elif isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        else:
            return None
    return here


def read_variables(
    template: Template,
    source: Mapping[str, Any],
    target: Mapping[str, Any] | None,
    recipe: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], list[Finding]]:
    """Evaluate the variables of a template.

    Args:
        template: Whose variables.
        source: The speculators config.json.
        target: The target's language-model config, if it is at hand.
        recipe: The recipe that training recorded, if any.

    Returns:
        The values (a variable that could not be read is missing) and an error
        finding for each that is missing or has the wrong type.
    """
    values: dict[str, Any] = {}
    findings: list[Finding] = []
    for name, variable in template.variables.items():
        try:
            problem = _read(name, variable, source, target, recipe, values)
        except ExpressionError:
            # It depends on a variable that already has its own finding.
            continue
        if problem is not None:
            findings.append(problem)
    return values, findings


def _read(
    name: str,
    variable: Variable,
    source: Mapping[str, Any],
    target: Mapping[str, Any] | None,
    recipe: Mapping[str, Any] | None,
    values: dict[str, Any],
) -> Finding | None:
    if variable.expr is not None:
        values[name] = evaluate(variable.expr, values)
        return None
    key = variable.source or variable.target or ""
    where = source if variable.source is not None else (target or {})
    found: Any = dig(where, key)
    if found is None and variable.record is not None and recipe is not None:
        found = dig(recipe, variable.record)
    older = variable.older
    if found is None and older is not None and _written_before(source, older.before):
        found = older.value
    if variable.of == "present":
        values[name] = bool(found)
        return None
    if variable.of == "state":
        values[name] = "value" if found is not None else _emptiness(where, key)
        return None
    if found is None:
        if variable.absent is None:
            return _missing(key, variable)
        found = evaluate(variable.absent, values)
    elif variable.of == "items":
        found = found if isinstance(found, list) else [found]
    elif variable.of == "count":
        if not isinstance(found, list):
            return _wrong(key, found, "a list")
        if not found and variable.absent is None:
            return _missing(key, variable)
        found = len(found) if variable.equal is None else found.count(variable.equal)
    of_type: bool = isinstance(found, _TYPES[variable.type])
    if not of_type or (isinstance(found, bool) and variable.type != "bool"):
        return _wrong(key, found, variable.type)
    # A hostile configuration must not make anything here large, or divide by zero.
    if variable.type == "int" and not variable.min <= found <= variable.max:
        return _wrong(key, found, f"a number from {variable.min} to {variable.max}")
    # An integer of JSON may be beyond every float; NaN is below nothing.
    if variable.type == "float" and not abs(found) <= sys.float_info.max:
        return _wrong(key, found, "a finite number")
    values[name] = found
    return None


def _written_before(source: Mapping[str, Any], release: str) -> bool:
    """Whether config.json says that an older speculators wrote it."""
    try:
        return Version(str(source.get("speculators_version"))) < Version(release)
    except InvalidVersion:
        return False


def _emptiness(config: Mapping[str, Any], key: str) -> str:
    """Whether a key without a value is there: ``null`` or ``absent``."""
    above, _, last = key.rpartition(".")
    inner = dig(config, above) if above else config
    return "null" if isinstance(inner, Mapping) and last in inner else "absent"


def _wrong(key: str, found: Any, wanted: str) -> Finding:
    return error(
        "config-invalid",
        key,
        f"is {found!r}, expected {wanted}",
        "correct the configuration of the checkpoint",
    )


def _missing(key: str, variable: Variable) -> Finding:
    hint = "put the value that training used into the checkpoint's config.json"
    if variable.missing == "layer-ids-unknown":
        message = (
            "the auxiliary layer ids are not recorded; SGLang's default set would be "
            "a guess"
        )
    elif variable.target is not None:
        message, hint = "the target's configuration lacks it", "give --target DIR"
    else:
        message = "is missing, and no class default says what training used"
    return error(variable.missing, key, message, hint)
