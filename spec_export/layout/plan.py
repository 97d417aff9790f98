"""Plans an export: pure decisions over names, shapes and configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from packaging.version import Version

from spec_export.findings import (
    CODES,
    Finding,
    Severity,
    apply_allow,
    error,
    has_errors,
    info,
    usage_error,
    warning,
)
from spec_export.layout.accounting import account
from spec_export.layout.catalog import families, templates
from spec_export.layout.conditions import holds, refused
from spec_export.layout.config import build_config
from spec_export.layout.expressions import fields, names
from spec_export.layout.fit import fit_target
from spec_export.layout.plan_types import Plan
from spec_export.layout.releases import instead_of, newest_known
from spec_export.layout.targets import (
    TargetFacts,
    capture_ids,
    served_embedding,
)
from spec_export.layout.template import Template
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.variables import dig, read_variables

PluginChoice = Literal["auto", "never", "always"]


def make_plan(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    target: TargetFacts | None,
    release: Version,
    *,
    plugin: PluginChoice = "auto",
    allow: Iterable[str] = (),
    dtype: str = "bfloat16",
    recipe: Mapping[str, Any] | None = None,
) -> Plan:
    """Decide how a draft becomes an export.

    A stock class is taken where one is exact (the first template of the family that
    is). Under ``plugin="auto"`` the
    plug-in's class is taken where only that is exact; ``always`` takes it in any
    case, ``never`` not at all.

    Args:
        config: The speculators config.json.
        tensors: What the checkpoint or module holds.
        target: The target, or None if its configuration is not at hand.
        release: The oldest release that the deployers run.
        plugin: The choice above.
        allow: Codes of deviations that the user accepts.
        dtype: Saved float dtype.
        recipe: ``train`` block that training recorded, for flags that old
            configurations lack.

    Returns:
        The plan; ``plan.ok`` says whether it may be written.

    Raises:
        SpecExportError: exit 2 when ``plugin="always"`` and there is no plug-in
            class for this family.
    """
    kind = config.get("speculators_model_type")
    found = templates(kind) if isinstance(kind, str) else ()
    layers = dig(config, "transformer_layer_config.model_type")
    found = tuple(t for t in found if layers in (t.serves.layers or [layers]))
    if not found:
        return _no_family(kind, layers if kind in families() else None)
    stock = [t for t in found if not t.serves.plugin]
    plugged = [t for t in found if t.serves.plugin]
    allow = tuple(allow)

    def attempt(template: Template, allow: tuple[str, ...] = allow) -> Plan:
        return plan_with(
            template, config, tensors, target, release, allow, dtype, recipe
        )

    if plugin == "always":
        if not plugged:
            raise usage_error(
                "option-invalid",
                "--plugin",
                f"always: the serving plug-in has no class for {kind} drafts",
                "use --plugin auto",
            )
        return attempt(plugged[0])
    plan = _first_exact(stock, attempt, allow) if stock else attempt(plugged[0])
    if plan.ok or plugin == "never" or not plugged or not stock:
        return plan
    second = attempt(plugged[0])
    if not second.ok:
        return plan
    # Of a release that is too old it is the feature that says something.
    reasons = sorted(
        {
            f.subject if f.code == "release-too-old" else f.code
            for f in plan.findings
            if f.severity is Severity.ERROR
        }
    )
    second.findings.append(
        info(
            "plugin-needed",
            "--plugin",
            f"stock SGLang is not exact here ({', '.join(reasons)}); the export is "
            f"written for the spec-export plug-in: exact, at the price of installing "
            f"spec-export on every server (SGLang >= {second.min_version}). A stock "
            "server refuses the folder; --plugin never refuses the draft",
            "pip install spec-export on the server; for a stock server: "
            + "; ".join(_other_ways(plan)),
        )
    )
    return second


def _other_ways(plan: Plan) -> list[str]:
    """What the errors of a plan say one could do instead, without the plug-in."""
    hints = [
        f.hint.split(", or export for")[0]
        for f in plan.findings
        if f.severity is Severity.ERROR and f.hint is not None
    ]
    return list(dict.fromkeys(hints))


def _first_exact(
    stock: list[Template], attempt: Callable[..., Plan], allow: tuple[str, ...]
) -> Plan:
    """The first template that is exact, before any that is so only by permission.

    What no class of the family avoids is no reason against one of them, once allowed.
    """
    plan = attempt(stock[0])
    if len(stock) == 1:
        return plan
    reasons = [_reasons(attempt(template, ())) for template in stock]
    shared = tuple(sorted(set(allow).intersection(*reasons)))
    if plan.ok and reasons[0] <= set(shared):
        return plan
    for template in stock[1:]:
        other = attempt(template, shared)
        if other.ok:
            why = ", ".join(sorted(reasons[0] - set(shared)))
            other.findings.append(
                info(
                    "exact-rewrite",
                    "architectures",
                    f"written for {other.architecture} ({other.algorithm}): "
                    f"{plan.architecture} would not be exact ({why})",
                    "start the server with the launch line of the export; it has "
                    f"--speculative-algorithm {other.algorithm}",
                )
            )
            return other
    return plan


def _reasons(plan: Plan) -> set[str]:
    return {f.code for f in plan.findings if f.severity is Severity.ERROR}


def _no_family(kind: Any, layers: Any = None) -> Plan:
    """The plan of a draft that nothing serves: only a finding with what to train."""
    hint = instead_of(str(kind)) or f"known families: {', '.join(families())}"
    what = f"is {kind!r}" + ("" if layers is None else f" with {layers} layers")
    plan = Plan(template="", architecture="", algorithm="")
    plan.findings.append(
        error(
            "family-unsupported",
            "speculators_model_type",
            f"{what}; no SGLang class serves it (every release up to {newest_known()})",
            hint,
        )
    )
    return plan


def plan_with(
    template: Template,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    target: TargetFacts | None,
    release: Version,
    allow: tuple[str, ...] = (),
    dtype: str = "bfloat16",
    recipe: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan with one given template; arguments as in ``make_plan``."""
    serves = template.serves
    plan = Plan(template.template, serves.architecture, serves.algorithm)
    plan.requires_plugin = serves.plugin
    # A multimodal target keeps its quantisation beside the text configuration.
    about = None if target is None else {**target.config, **target.text}
    values, problems = read_variables(template, config, about, recipe)
    plan.findings += problems
    if target is None:
        plan.findings.append(
            error(
                "target-needed",
                "speculators_config.verifier.name_or_path",
                "the target's config.json is not at hand; layer ids depend on its "
                "class and depth",
                "give the target's folder with --target DIR",
            )
        )
    values |= served_embedding(target, dtype)
    demands = [(serves.since, f"{serves.architecture}")]
    _capture(template, config, target, release, values, plan, demands)
    if _unreadable(template, values):
        plan.findings = apply_allow(plan.findings, allow)
        return plan
    accounts = account(
        template, tensors, values, "missing" if target is None else target.head
    )
    plan.placements, plan.fates = accounts.placements, accounts.fates
    plan.from_target, plan.nonzero = accounts.from_target, accounts.nonzero
    plan.findings += accounts.findings
    plan.findings += refused(template.refuse, values)
    _features(template, values, release, plan, demands)
    _flags(template, values, release, plan, demands)
    plan.config, plan.config_changes, problems = build_config(
        template, config, values, dtype
    )
    plan.findings += problems
    if target is not None:
        fit_target(target, values, plan)
    oldest = max(demands, key=lambda d: Version(d[0]))
    plan.min_version = oldest[0]
    plan.reasons = list(dict.fromkeys(w for v, w in demands if v == oldest[0]))
    plan.vocab = {"draft_size": values.get("DV"), "target_size": values.get("V")}
    plan.findings = apply_allow(plan.findings, allow)
    return plan


def _unreadable(template: Template, values: Mapping[str, Any]) -> bool:
    """Whether a value that shapes, config.json or launch line need was not read."""
    needed = {n for argument in template.serves.launch for n in fields(argument)}
    needed -= {"draft", "target"}
    for rule in template.tensors:
        for expr in [rule.exists, *rule.each.values(), *(rule.shape or [])]:
            needed |= names(expr) - set(rule.each)
    for parameter in template.parameters:
        for expr in [parameter.exists, *parameter.each.values(), *parameter.shape]:
            needed |= names(expr) - set(parameter.each)
    for config in template.config:
        needed |= names(config.when)
        if config.expr is not None:
            needed |= names(config.expr)
    return bool(needed - set(values))


def _capture(
    template: Template,
    config: Mapping[str, Any],
    target: TargetFacts | None,
    release: Version,
    values: dict[str, Any],
    plan: Plan,
    demands: list[tuple[str, str]],
) -> None:
    values["target_config"] = {} if target is None else target.config
    if template.capture is None:
        values["layer_ids"], values["default_layer_ids"] = [], True
        return
    key = template.capture.ids
    ids = dig(config, key)
    values["layer_ids"], values["default_layer_ids"] = [], True
    if target is None or not isinstance(ids, list) or not ids:
        return
    captured = capture_ids(
        ids,
        target,
        template.capture.hook,
        key,
        release,
        draft=template.serves.architecture,
    )
    plan.findings += captured.findings
    values["default_layer_ids"] = captured.default
    if captured.ids is not None:
        values["layer_ids"] = captured.ids
        demands.append((captured.min_version, captured.reason))


def _features(
    template: Template,
    values: Mapping[str, Any],
    release: Version,
    plan: Plan,
    demands: list[tuple[str, str]],
) -> None:
    if Version(template.serves.since) > release:
        plan.findings.append(
            error(
                "release-too-old",
                "architectures",
                f"{template.serves.architecture} reads this layout since "
                f"{template.serves.since}, {release} was asked for",
                f"--sglang {template.serves.since} or newer",
            )
        )
    for feature in template.features:
        if not holds(feature.when, values, feature.why):
            continue
        why = feature.why.format_map(values)
        demands.append((feature.since, feature.name))
        if Version(feature.since) > release:
            plan.findings.append(
                error(
                    "release-too-old",
                    feature.subject,
                    f"needs SGLang >= {feature.since}, {release} was asked for: {why}",
                    f"--sglang {feature.since} or newer, or train without it",
                )
            )


def _flags(
    template: Template,
    values: Mapping[str, Any],
    release: Version,
    plan: Plan,
    demands: list[tuple[str, str]],
) -> None:
    words = {**values, "draft": "{draft}", "target": "{target}"}
    plan.launch = [argument.format_map(words) for argument in template.serves.launch]
    oldest = max(Version(since) for since, _ in demands)
    for flag in template.flags:
        if flag.before is not None and oldest >= Version(flag.before):
            continue  # no release that can serve this draft needs it
        if not holds(flag.when, values, *flag.argv, flag.message, flag.note):
            continue
        if flag.before is not None and release >= Version(flag.before):
            # The launch line is for this release on; who runs an older one reads it.
            if flag.note:
                plan.notes.append(flag.note.format_map(values))
            continue
        if flag.since is None or release >= Version(flag.since):
            plan.launch += [a.format_map(values) for a in flag.argv]
            demands.append((flag.since or "0", flag.argv[0]))
        if flag.note:
            plan.notes.append(flag.note.format_map(values))
        if flag.code is not None and flag.subject is not None:
            plan.findings.append(
                warning(
                    flag.code,
                    flag.subject,
                    (flag.message or "").format_map(values),
                    "start the server with " + " ".join(flag.argv).format_map(values),
                )
            )


def deviations(findings: Iterable[Finding], allow: Iterable[str]) -> list[Finding]:
    """The findings that were accepted by name."""
    allowed = set(allow)
    return [
        f
        for f in findings
        if f.code in allowed and CODES[f.code].allowable and not has_errors([f])
    ]
