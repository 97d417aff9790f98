"""What a template's conditions say about one draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spec_export.findings import Finding, Severity, finding
from spec_export.layout.expressions import evaluate, fields, names
from spec_export.layout.template import Refusal


def holds(
    expr: str | int | bool, values: Mapping[str, Any], *texts: str | None
) -> bool:
    """A condition; one over a value that could not be read does not hold.

    Args:
        expr: The condition.
        values: Variables.
        texts: What will be said if it holds; its values have to be readable too.
    """
    needed = names(expr).union(*(fields(text or "") for text in texts))
    return not needed - set(values) and bool(evaluate(expr, values))


def refused(rules: Iterable[Refusal], values: Mapping[str, Any]) -> list[Finding]:
    """The findings of those refusals whose condition holds."""
    return [
        finding(
            Severity(rule.severity),
            rule.code,
            rule.subject,
            rule.message.format_map(values),
            rule.hint.format_map(values),
        )
        for rule in rules
        if holds(rule.when, values, rule.message, rule.hint)
    ]
