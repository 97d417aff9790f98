"""Builds config.json from a template's rules: an allow-list, never a copy.

Two readers share the file (transformers' config class and SGLang's ``getattr``),
and both treat null, false and absence differently; that is why each key has a rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from spec_export.findings import Finding, error
from spec_export.layout.expressions import evaluate
from spec_export.layout.plan_types import ConfigChange
from spec_export.layout.rope import RopeError, write_rope
from spec_export.layout.target_rope import older_rope, older_rope_only
from spec_export.layout.template import ConfigRule, Template
from spec_export.layout.variables import dig

_MISSING = object()
_DTYPE_KEYS = ("dtype", "torch_dtype")


def build_config(
    template: Template,
    source: Mapping[str, Any],
    values: Mapping[str, Any],
    dtype: str,
) -> tuple[dict[str, Any], list[ConfigChange], list[Finding]]:
    """Write the serving configuration.

    Args:
        template: Its rules.
        source: The speculators config.json.
        values: Variables of the template, converted layer ids included.
        dtype: Name of the saved float dtype, for example ``bfloat16``.

    Returns:
        config.json as a dictionary, what differs from the source and why, and
        findings about values that cannot be translated.
    """
    config: dict[str, Any] = {}
    findings: list[Finding] = []
    for rule in template.config:
        if not evaluate(rule.when, values):
            continue
        if rule.function is not None:
            try:
                config.update(_FUNCTIONS[rule.function](source, values, dtype))
            except RopeError as exc:
                findings.append(_rope_finding(exc))
            continue
        value = _simple(rule, source, values)
        if value is not _MISSING:
            _put(config, rule.key, value)
    return config, _changes(template, source, config), findings


def _simple(
    rule: ConfigRule, source: Mapping[str, Any], values: Mapping[str, Any]
) -> Any:
    if rule.expr is not None:
        return evaluate(rule.expr, values)
    if rule.copy_ is not None:
        found = dig(source, rule.copy_)
        return _MISSING if found is None else found
    return rule.value


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value


def _rope(
    source: Mapping[str, Any], values: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    return write_rope(source.get("transformer_layer_config") or {})


def _dtype(
    source: Mapping[str, Any], values: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    # transformers < 4.56 knows torch_dtype only, SGLang >= 0.5.4.post1 reads dtype;
    # without either SGLang computes in float16.
    return dict.fromkeys(_DTYPE_KEYS, dtype)


def _target(
    source: Mapping[str, Any], values: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    # The MTP classes are built from the whole configuration of the target. Its
    # quantisation and dtype are not those of the draft's tensors; SGLang prefers the
    # dtype beside the text model's sizes.
    target = copy.deepcopy(dict(values["target_config"]))
    for config in (target, target.get("text_config") or {}):
        config.pop("quantization_config", None)
        config.update({key: dtype for key in _DTYPE_KEYS if key in config})
        older = older_rope(config.get("rope_parameters"))
        config.update(older)
        # Both would be right, but the class fails on some types in the newer form.
        if "rope_scaling" in older and older_rope_only(target) is not None:
            del config["rope_parameters"]
    return target


_Function = Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]]
_FUNCTIONS: dict[str, _Function] = {
    "rope": _rope,
    "dtype": _dtype,
    "target": _target,
}


def _rope_finding(exc: RopeError) -> Finding:
    return error(
        "rope-untranslatable",
        "transformer_layer_config.rope_parameters",
        str(exc),
        "train with default, linear, llama3 or yarn RoPE (--draft-config)",
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out


def _changes(
    template: Template, source: Mapping[str, Any], config: Mapping[str, Any]
) -> list[ConfigChange]:
    """Compare by meaning: a key keeps its name or comes from the layer config."""
    rules = {rule.key: rule for rule in template.config}
    changes = []
    for key in config:
        nested = [k for k in rules if k.startswith(f"{key}.")]
        for dotted in nested or [key]:
            rule = rules.get(dotted)
            value = dig(config, dotted)
            before = _before(template, source, dotted, rule)
            if value is not None and before != value:
                text = rule.rule if rule is not None and rule.rule else None
                text = text or _RULES.get(key) or f"template {template.template}"
                changes.append(ConfigChange(dotted, before, value, text))
    for key in source:
        if key not in config and key not in template.ignored_config:
            text = "not read by SGLang; only listed keys are written"
            changes.append(ConfigChange(key, source[key], None, text))
    return changes


def _before(
    template: Template, source: Mapping[str, Any], key: str, rule: ConfigRule | None
) -> Any:
    """What the source says about a key of the export."""
    name = key.rpartition(".")[2]
    places = [name, f"transformer_layer_config.{name}"]
    if rule is not None and rule.copy_ is not None:
        places.insert(0, rule.copy_)
    if rule is not None and rule.expr == "layer_ids" and template.capture is not None:
        places.insert(0, template.capture.ids)
    found = (dig(source, place) for place in places)
    return next((value for value in found if value is not None), None)


_RULES = {
    "rope_theta": "releases before 0.5.10 read rope_theta and rope_scaling only",
    "rope_scaling": "releases before 0.5.10 read rope_theta and rope_scaling only",
    "rope_parameters": "transformers 5 and SGLang >= 0.5.10 read rope_parameters",
    "dtype": "the dtype of the saved tensors, for every reader",
    "torch_dtype": "the dtype of the saved tensors, for every reader",
}
