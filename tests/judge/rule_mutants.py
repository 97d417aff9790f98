"""Mutants of the rules of a template, made of the parsed YAML."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Raw = dict[str, Any]
_LOWER = {"0.5.12": "0.5.2", "0.5.17": "0.5.16", "0.5.4.post2": "0.5.2"}
_LABELS = {
    "tensors": "source",
    "parameters": "name",
    "config": "key",
    "refuse": "code",
    "features": "name",
    "flags": "argv",
}


def rule_mutants(raw: Raw) -> Iterator[tuple[str, Raw]]:
    """``section: rule: what was done``, and the whole template with it done."""
    for section, label in _LABELS.items():
        for at, rule in enumerate(raw.get(section, [])):
            name = f"{section}: {rule[label]}"
            less = copy.deepcopy(raw)
            del less[section][at]
            yield f"{name}: dropped", less
            for how, other in _changed(raw, section, rule):
                mutant = copy.deepcopy(raw)
                mutant[section][at] = {k: v for k, v in other.items() if v is not ...}
                yield f"{name}: {how}", mutant
    yield from _swapped(raw)
    yield from _lies(raw)
    yield from _variables(raw)
    for how, serves in _serves(raw["serves"]):
        yield f"serves: {how}", {**raw, "serves": serves}
    for name, choices in raw["names"].items():
        for at in range(len(choices)):
            typo = copy.deepcopy(choices)
            typo[at]["is"] += "x"
            yield f"names: {name} {at}: other", {**raw, "names": {name: typo}}
        swapped = [{**choices[0], "is": choices[1]["is"]}, choices[0] | {"when": True}]
        yield f"names: {name}: swapped", {**raw, "names": {name: swapped}}
    for key, other in (("ids", "none"), ("hook", "dflash")):
        capture = {**raw["capture"], key: other}
        yield f"capture: {key}", {**raw, "capture": capture}
    yield "capture: dropped", {k: v for k, v in raw.items() if k != "capture"}


def _changed(raw: Raw, section: str, rule: Raw) -> Iterator[tuple[str, Raw]]:
    for key in ("exists", "when"):
        if isinstance(rule.get(key), str):
            yield f"{key} negated", {**rule, key: f"not ({rule[key]})"}
            yield f"{key} true", {**rule, key: True}
    if isinstance(rule.get("shape"), list):
        shape = rule["shape"]
        yield "shape off by one", {**rule, "shape": [f"({shape[0]}) + 1", *shape[1:]]}
        if len(shape) == 2:
            yield "shape transposed", {**rule, "shape": shape[::-1]}
    for index, each in (rule.get("each") or {}).items():
        if not str(each).startswith("["):
            fewer = {**rule["each"], index: f"({each}) - 1"}
            yield f"{index} off by one", {**rule, "each": fewer}
    if "since" in rule:
        yield "since lower", {**rule, "since": _LOWER.get(rule["since"], "0.4.9")}
    yield from _OWN[section](rule) if section in _OWN else ()


def _tensor(rule: Raw) -> Iterator[tuple[str, Raw]]:
    kind = rule.get("kind", "float")
    yield "kind", {**rule, "kind": "int64" if kind == "float" else "float"}
    yield "optional", {**rule, "optional": not rule.get("optional", False)}
    if "deviation" in rule:
        yield "deviation dropped", {**rule, "deviation": ...}
    if "fill" in rule:
        yield "fill dropped", {**rule, "fill": ...}
    if isinstance(rule.get("export"), str):
        yield "export other", {**rule, "export": f"x{rule['export']}"}
        source = rule["source"]
        if source != rule["export"]:
            yield "export not renamed", {**rule, "export": source}
    elif "export" in rule:
        for at in range(len(rule["export"])):
            only = [{"is": rule["export"][at]["is"]}]
            yield f"export always {at}", {**rule, "export": only}
    if "export" in rule:
        yield (
            "fate dropped",
            {**rule, "export": ..., "fate": "dropped", "reason": "a lie"},
        )
    if rule.get("fate") == "provided_by_target":
        yield "fate dropped", {**rule, "fate": "dropped"}


def _parameter(rule: Raw) -> Iterator[tuple[str, Raw]]:
    yield "name other", {**rule, "name": f"x{rule['name']}"}
    if rule.get("origin") == "target":
        yield "origin export", {**rule, "origin": "export"}
    else:
        other = {"origin": "target", "counterpart": "norm"}
        yield "origin target", {**rule, **other}


def _config(rule: Raw) -> Iterator[tuple[str, Raw]]:
    if "value" in rule:
        value = rule["value"]
        other: Any = [] if isinstance(value, list) else "other"
        yield "value", {**rule, "value": not value if value in (True, False) else other}
    if "expr" in rule:
        expr = rule["expr"]
        yield "expr null", {**rule, "expr": ..., "value": None}
        if expr == "layer_ids":
            unmoved = {"copy": "eagle_aux_hidden_state_layer_ids"}
            yield "ids not moved", {**rule, "expr": ..., **unmoved}
        elif expr == "act":
            yield "expr other", {**rule, "expr": "'gelu'"}
        elif rule["key"] in _BOOLEAN:
            yield "expr negated", {**rule, "expr": f"not ({expr})"}
        else:
            yield "expr off by one", {**rule, "expr": f"{expr} + 1"}
    if "copy" in rule:
        yield "copy other", {**rule, "copy": "transformer_layer_config.none"}
    if "function" in rule:
        other = "dtype" if rule["function"] == "rope" else "rope"
        yield "function other", {**rule, "function": other}


_BOOLEAN = {
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_config.norm_before_fc",
    "attention_bias",
    "mlp_bias",
    "norm_before_residual",
    "qk_norm",
}


def _flag(rule: Raw) -> Iterator[tuple[str, Raw]]:
    if len(rule["argv"]) == 2 and "{" in rule["argv"][1]:
        yield "another number", {**rule, "argv": [rule["argv"][0], "{W}"]}
    for key in ("before", "since"):
        if key in rule:
            yield f"{key} dropped", {**rule, key: ...}


_OWN: dict[str, Any] = {
    "tensors": _tensor,
    "parameters": _parameter,
    "config": _config,
    "flags": _flag,
}


def _swapped(raw: Raw) -> Iterator[tuple[str, Raw]]:
    """Two rules of the same shape and indices exchange their export names."""
    rules = [
        (at, rule)
        for at, rule in enumerate(raw["tensors"])
        if isinstance(rule.get("export"), str)
    ]
    for n, (a, one) in enumerate(rules):
        for b, other in rules[n + 1 :]:
            alike = ("shape", "each", "exists", "kind")
            if all(one.get(key) == other.get(key) for key in alike):
                mutant = copy.deepcopy(raw)
                mutant["tensors"][a]["export"] = other["export"]
                mutant["tensors"][b]["export"] = one["export"]
                yield (
                    f"tensors: {one['source']}: swapped with {other['source']}",
                    mutant,
                )


def _lies(raw: Raw) -> Iterator[tuple[str, Raw]]:
    """A tensor dropped, and the parameter that it would set forgotten with it."""
    for at, rule in enumerate(raw["tensors"]):
        export = rule.get("export")
        names = [export] if isinstance(export, str) else [e["is"] for e in export or []]
        if not names:
            continue
        mutant = copy.deepcopy(raw)
        lie = {k: v for k, v in rule.items() if k != "export"}
        mutant["tensors"][at] = {**lie, "fate": "dropped", "reason": "a lie"}
        mutant["parameters"] = [p for p in raw["parameters"] if p["name"] not in names]
        yield f"tensors: {rule['source']}: dropped with its parameter", mutant


def _variables(raw: Raw) -> Iterator[tuple[str, Raw]]:
    for name, rule in raw["variables"].items():
        changes: list[tuple[str, Raw]] = []
        if "source" in rule:
            missing = f"{rule['source']}_"
            changes.append(("source missing", {**rule, "source": missing}))
            inner = rule["source"].removeprefix("transformer_layer_config.")
            moved = f"transformer_layer_config.{inner}"
            moved = inner if moved == rule["source"] else moved
            changes.append(("source elsewhere", {**rule, "source": moved}))
        if "target" in rule:
            changes.append(("target missing", {**rule, "target": "none"}))
        if "expr" in rule:
            changes.append(("expr off by one", {**rule, "expr": f"{rule['expr']} + 1"}))
        if "absent" in rule:
            changes.append(("absent dropped", {**rule, "absent": ...}))
            other = not rule["absent"] if isinstance(rule["absent"], bool) else 7
            changes.append(("absent other", {**rule, "absent": other}))
        if "equal" in rule:
            changes.append(("equal other", {**rule, "equal": "chunked_attention"}))
        for how, other in changes:
            kept = {k: v for k, v in other.items() if v is not ...}
            variables = {**raw["variables"], name: kept}
            yield f"variables: {name}: {how}", {**raw, "variables": variables}


def _serves(serves: Raw) -> Iterator[tuple[str, Raw]]:
    known = ["LlamaForCausalLMEagle3", "SpecExportEagle3ForCausalLM"]
    other = next(k for k in known if k != serves["architecture"])
    yield "architecture other", {**serves, "architecture": other}
    yield "algorithm other", {**serves, "algorithm": "EAGLE"}
    yield "since lower", {**serves, "since": "0.4.5"}
    yield "plugin other", {**serves, "plugin": not serves.get("plugin", False)}
    for at in range(0, len(serves["launch"]), 2):
        flag = serves["launch"][at]
        launch = serves["launch"][:at] + serves["launch"][at + 2 :]
        yield f"{flag} dropped", {**serves, "launch": launch}
        launch = [*serves["launch"][: at + 1], "7", *serves["launch"][at + 2 :]]
        yield f"{flag} other", {**serves, "launch": launch}
