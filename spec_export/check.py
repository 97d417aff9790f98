"""Can what a recipe will train be served? Answered from configurations alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export.artifact.compose import facts_of_target
from spec_export.artifact.resolve import resolve_target
from spec_export.artifact.target import open_target
from spec_export.findings import Finding, check_allow, info, warning
from spec_export.layout.accounting import expected_tensors
from spec_export.layout.catalog import templates
from spec_export.layout.plan import PluginChoice, make_plan
from spec_export.layout.plan_types import Plan
from spec_export.layout.releases import parse_release
from spec_export.layout.tensors import ITEM_SIZE, TensorInfo
from spec_export.layout.variables import read_variables

if TYPE_CHECKING:
    from spec_export.training.recipe import CallbackEntry


@dataclass
class CheckResult:
    """The answer to ``spec-export check``.

    Attributes:
        plan: How the draft will be exported.
        findings: Those of the plan and of the recipe.
        source_bytes: Size of speculators' own checkpoint, saved in bfloat16.
        export_bytes: Size of the export's weights.
    """

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    source_bytes: int = 0
    export_bytes: int = 0


def check_recipe(
    recipe: Path | Sequence[str],
    exporter: CallbackEntry | None = None,
    *,
    sglang: str | None = None,
    plugin: PluginChoice | None = None,
    allow: Sequence[str] = (),
    target: Path | None = None,
) -> CheckResult:
    """Plan the export of what a recipe will train; builds no model.

    Args:
        recipe: A recipe file, or the arguments of ``speculators train``.
        exporter: The callback; by default the first of ours in the recipe file.
        sglang: Oldest release; the callback decides when it is None.
        plugin: ``auto``, ``never`` or ``always``; the same.
        allow: Codes accepted by name, besides the recipe's.
        target: Stands in for the recipe's target; config.json is enough.

    Returns:
        The plan and its findings.

    Raises:
        SpecExportError: exit 2 for a recipe that does not parse and a ``target``
            that is not there; exit 1 when the configuration of the recipe's target
            is needed and missing.
    """
    from spec_export.training.draft_config import resolve_draft
    from spec_export.training.recipe import (
        as_in_recipe,
        check_output_dir,
        named_as_in_recipe,
        read_recipe,
    )

    if exporter is None and isinstance(recipe, Path):
        exporter = next(iter(read_recipe(recipe).exporters), None)
    settings = exporter.config if exporter is not None else None
    where = exporter.where if exporter is not None else ""
    check_allow(allow)
    options = {"sglang": sglang, "plugin": plugin}
    # What the recipe does not say is no key of it.
    asked = [n for n, value in options.items() if settings is None or value is not None]
    if settings is not None:
        allow = (*allow, *settings.allow)
        sglang, plugin = sglang or settings.sglang, plugin or settings.plugin
    release, findings = parse_release(sglang)
    explicit = open_target(target) if target is not None else None
    draft = resolve_draft(recipe, target)
    if settings is not None:
        check_output_dir(settings.output_dir, draft.save_path, where)
    findings += draft.findings
    opened = explicit or resolve_target(draft.verifier, None)[0]
    tensors = expected_source(draft.config)
    with named_as_in_recipe(where, asked):
        plan = make_plan(
            draft.config,
            tensors,
            facts_of_target(opened),
            release,
            plugin=plugin or "auto",
            allow=allow,
            dtype=(settings.dtype if settings is not None else None) or "bfloat16",
        )
    findings += _no_effect(draft.speculator_type, draft.flags)
    if settings is None and isinstance(recipe, Path):
        findings.append(
            info(
                "callbacks-missing",
                "callbacks",
                f"{recipe.name} has no such block, so a training exports nothing",
                "add it beside 'train:', or finalize a checkpoint afterwards",
            )
        )
    plan.findings = as_in_recipe([*findings, *plan.findings], where, asked)
    return CheckResult(
        plan,
        plan.findings,
        sum(t.nbytes for t in tensors.values()),
        sum(_bytes(p.shape, p.kind) for p in plan.placements),
    )


def expected_source(config: dict[str, Any]) -> dict[str, TensorInfo]:
    """The tensors that speculators will save for a configuration."""
    kind = config.get("speculators_model_type")
    found = templates(kind) if isinstance(kind, str) else ()
    if not found:
        return {}
    values, problems = read_variables(found[0], config, {}, None)
    values |= {"layer_ids": [], "default_layer_ids": True}
    problems = [p for p in problems if p.subject not in _TARGETS_OWN]
    return {} if problems else expected_tensors(found[0], values)


# Variables that only the target's configuration has; shapes do not depend on them.
_TARGETS_OWN = frozenset({"num_hidden_layers"})


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    size = ITEM_SIZE["I64"] if kind == "int64" else ITEM_SIZE["BF16"]
    for n in shape:
        size *= n
    return size


def _no_effect(speculator_type: str, flags: dict[str, Any]) -> list[Finding]:
    if speculator_type == "eagle3" and flags.get("embed_requires_grad"):
        return [
            warning(
                "embedding-flag-no-effect",
                "embed_requires_grad",
                "is true, but EAGLE-3 looks the embedding up without gradients, so "
                "nothing of it is trained",
                "leave the flag out (SGLang uses the target's embedding anyway)",
            )
        ]
    return []
