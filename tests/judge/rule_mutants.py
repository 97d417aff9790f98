"""Mutants of the rules of a template, made of the parsed YAML.

The ``loader`` section is left out: it is for folders that others wrote, no export
depends on it.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any

from mutants import WORDS

from spec_export.judge.reference import REFERENCES
from spec_export.layout.inherit import _IDENTITY, extend

Raw = dict[str, Any]


def rule_mutants(raw: Raw, own: Raw) -> Iterator[tuple[str, Raw]]:
    """``section: rule: what was done``, and the whole template with it done.

    Args:
        raw: The whole template, merged with the one that it extends.
        own: What its own file says. Rules that it inherits are mutated where they
            stand; what they write is mutated for each template apart.
    """
    for section, label in _IDENTITY.items():
        mine = {_identity(rule, label) for rule in own.get(section, [])}
        for at, rule in enumerate(raw.get(section, [])):
            if _identity(rule, label) not in mine:
                continue
            name = f"{section}: {_identity(rule, label)}"
            less = {**raw, section: [*raw[section][:at], *raw[section][at + 1 :]]}
            yield f"{name}: dropped", less
            for how, other in _changed(raw, section, rule):
                rules = list(raw[section])
                rules[at] = _without_gaps(other)
                yield f"{name}: {how}", {**raw, section: rules}
    sources = {rule["source"] for rule in own.get("tensors", [])}
    yield from _swapped(raw, sources)
    yield from _lies(raw, sources)
    yield from _variables(raw, own)
    for how, serves in _serves(raw["serves"], set(own.get("serves", {}))):
        yield f"serves: {how}", {**raw, "serves": _without_gaps(serves)}
    for name, choices in own.get("names", {}).items():
        for at in range(len(choices)):
            typo = copy.deepcopy(choices)
            typo[at]["is"] += "x"
            yield f"names: {name} {at}: other", {**raw, "names": {name: typo}}
        swapped = [{**choices[0], "is": choices[1]["is"]}, choices[0] | {"when": True}]
        yield f"names: {name}: swapped", {**raw, "names": {name: swapped}}
    if capture := own.get("capture"):
        hook = "dflash" if capture["hook"] == "eagle3" else "eagle3"
        for key, other in (("ids", "none"), ("hook", hook)):
            yield f"capture: {key}", {**raw, "capture": {**capture, key: other}}
        yield "capture: dropped", {k: v for k, v in raw.items() if k != "capture"}
    if "speculators_type" in own:
        yield "speculators_type: other", {**raw, "speculators_type": "other"}


def restored(base: Raw, own: Raw) -> Iterator[tuple[str, Raw]]:
    """Rules that a template removes from the one that it extends, left in."""
    for section, label in _IDENTITY.items():
        for at, rule in enumerate(own.get(section, [])):
            if rule.get("remove"):
                kept = [*own[section][:at], *own[section][at + 1 :]]
                name = f"{section}: {_identity(rule, label)}: not removed"
                yield name, extend(base, {**own, section: kept})


def _identity(rule: Raw, label: tuple[str, ...]) -> str:
    return " ".join(str(rule.get(key)) for key in label)


def _without_gaps(rule: Raw) -> Raw:
    return {key: value for key, value in rule.items() if value is not ...}


def _before(release: str) -> str:
    """The release before one, which need not exist."""
    number, _, post = release.partition(".post")
    if post:
        return number
    *rest, patch = number.split(".")
    return ".".join([*rest, str(int(patch) - 1)])


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
        fewer = f"({each}) - 1"
        if str(each).startswith("["):
            fewer = str(ast.literal_eval(each)[:-1])
        yield f"{index} off by one", {**rule, "each": {**rule["each"], index: fewer}}
    if "since" in rule:
        yield "since lower", {**rule, "since": _before(rule["since"])}
    if section == "config":
        yield from _config(raw, rule)
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
        for index, each in (rule.get("each") or {}).items():
            if str(each).startswith("["):
                one, other = ast.literal_eval(each)[:2]
                crossed = {
                    "is": rule["export"].replace(f"{{{index}}}", other),
                    "when": f"{index} == '{one}'",
                }
                yield (
                    f"export of {one} as {other}",
                    {**rule, "export": [crossed, {"is": rule["export"]}]},
                )
    elif "export" in rule:
        for at in range(len(rule["export"])):
            only = [{"is": rule["export"][at]["is"]}]
            yield f"export always {at}", {**rule, "export": only}
    if "export" in rule:
        yield (
            "fate dropped",
            {**rule, "export": ..., "fate": "dropped", "reason": "a lie"},
        )
    if rule.get("fate") in ("provided_by_target", "transformed"):
        yield "fate dropped", {**rule, "fate": "dropped", "reason": "a lie"}


def _derived(rule: Raw) -> Iterator[tuple[str, Raw]]:
    arguments = rule.get("arguments") or {}
    for key, expr in arguments.items():
        other = f"({expr}) + 1"
        if str(expr).startswith("["):
            _, *rest = expr.strip("[]").split(", ")
            other = f"[{', '.join([rest[-1], *rest] if rest else ['0'])}]"
        changed = {**arguments, key: other}
        yield f"{key} other", {**rule, "arguments": changed}
        less = {k: v for k, v in arguments.items() if k != key}
        yield f"{key} dropped", {**rule, "arguments": less}
    sources = rule.get("sources") or []
    if len(sources) == 2:
        yield "sources swapped", {**rule, "sources": sources[::-1]}
    constant = {"transform": "constant", "arguments": {"value": 1}, "sources": []}
    if rule["transform"] != "constant":
        yield "transform other", {**rule, **constant}


def _parameter(rule: Raw) -> Iterator[tuple[str, Raw]]:
    yield "name other", {**rule, "name": f"x{rule['name']}"}
    if "since" in rule:
        yield "since dropped", {**rule, "since": ...}
    if rule.get("origin") == "target":
        yield "origin export", {**rule, "origin": "export"}
    else:
        other = {"origin": "target", "counterpart": "norm"}
        yield "origin target", {**rule, **other}


def _config(raw: Raw, rule: Raw) -> Iterator[tuple[str, Raw]]:
    if "value" in rule:
        value = rule["value"]
        other: Any = [] if isinstance(value, list) else WORDS.get(value, "other")
        yield "value", {**rule, "value": not value if value in (True, False) else other}
    if "expr" in rule:
        expr = rule["expr"]
        yield "expr null", {**rule, "expr": ..., "value": None}
        if expr == "layer_ids":
            unmoved = {"copy": raw["capture"]["ids"]}
            yield "ids not moved", {**rule, "expr": ..., **unmoved}
        elif rule["key"] in _WORDS:
            yield "expr other", {**rule, "expr": _WORDS[rule["key"]]}
        elif rule["key"] in _BOOLEAN:
            yield "expr negated", {**rule, "expr": f"not ({expr})"}
        else:
            yield "expr off by one", {**rule, "expr": f"{expr} + 1"}
    if "copy" in rule:
        yield "copy other", {**rule, "copy": "transformer_layer_config.none"}
    if "function" in rule:
        other = "dtype" if rule["function"] != "dtype" else "rope"
        yield "function other", {**rule, "function": other}


_WORDS = {
    "hidden_act": "'gelu'",
    "markov_head_type": "'gated' if head == 'vanilla' else 'vanilla'",
}
_BOOLEAN = {
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_config.norm_before_fc",
    "attention_bias",
    "mlp_bias",
    "norm_before_residual",
    "qk_norm",
    "sample_from_anchor",
    "enable_confidence_head",
    "confidence_head_with_markov",
}


def _flag(rule: Raw) -> Iterator[tuple[str, Raw]]:
    if len(rule["argv"]) == 2 and "{" in rule["argv"][1]:
        yield "another number", {**rule, "argv": [rule["argv"][0], "{W}"]}
    elif len(rule["argv"]) == 2:
        yield "another value", {**rule, "argv": [rule["argv"][0], "other"]}
    for key in ("before", "since"):
        if key in rule:
            yield f"{key} dropped", {**rule, key: ...}


_OWN: dict[str, Any] = {
    "tensors": _tensor,
    "derived": _derived,
    "parameters": _parameter,
    "flags": _flag,
}


def _swapped(raw: Raw, sources: set[str]) -> Iterator[tuple[str, Raw]]:
    """Two rules of the same shape and indices exchange their export names."""
    rules = [
        (at, rule)
        for at, rule in enumerate(raw["tensors"])
        if isinstance(rule.get("export"), str) and rule["source"] in sources
    ]
    for n, (a, one) in enumerate(rules):
        for b, other in rules[n + 1 :]:
            alike = ("shape", "each", "exists", "kind")
            if all(one.get(key) == other.get(key) for key in alike):
                tensors = list(raw["tensors"])
                tensors[a] = {**one, "export": other["export"]}
                tensors[b] = {**other, "export": one["export"]}
                yield (
                    f"tensors: {one['source']}: swapped with {other['source']}",
                    {**raw, "tensors": tensors},
                )


def _lies(raw: Raw, sources: set[str]) -> Iterator[tuple[str, Raw]]:
    """A tensor dropped, and the parameters that it would set forgotten with it."""
    for at, rule in enumerate(raw["tensors"]):
        export = rule.get("export")
        names = [export] if isinstance(export, str) else [e["is"] for e in export or []]
        made = [
            d["name"]
            for d in raw.get("derived", [])
            if rule["source"] in d.get("sources", [])
        ]
        if rule["source"] not in sources or not (names or made):
            continue
        lie = {k: v for k, v in rule.items() if k != "export"}
        tensors = list(raw["tensors"])
        tensors[at] = {**lie, "fate": "dropped", "reason": "a lie"}
        forgotten = [_as_pattern(name) for name in (*names, *made)]
        mutant = {**raw, "tensors": tensors}
        for section in ("parameters", "derived"):
            mutant[section] = [
                p
                for p in raw.get(section, [])
                if not any(f.fullmatch(p["name"]) for f in forgotten)
            ]
        yield f"tensors: {rule['source']}: dropped with its parameter", mutant


def _as_pattern(name: str) -> re.Pattern[str]:
    """Parameters may be listed one by one where tensors have an index of words."""
    parts = re.split(r"\{[a-z]+\}", name)
    return re.compile(r"(?:\{[a-z]+\}|[a-z]+)".join(re.escape(part) for part in parts))


def _variables(raw: Raw, own: Raw) -> Iterator[tuple[str, Raw]]:
    for name in own.get("variables", {}):
        rule = raw["variables"][name]
        for how, other in _variable(rule):
            variables = {**raw["variables"], name: _without_gaps(other)}
            yield f"variables: {name}: {how}", {**raw, "variables": variables}


def _variable(rule: Raw) -> Iterator[tuple[str, Raw]]:
    if rule.get("source") is not None:
        yield "source missing", {**rule, "source": f"{rule['source']}_"}
        inner = rule["source"].removeprefix("transformer_layer_config.")
        moved = f"transformer_layer_config.{inner}"
        moved = inner if moved == rule["source"] else moved
        yield "source elsewhere", {**rule, "source": moved}
    if "target" in rule:
        yield "target missing", {**rule, "target": "none"}
    if rule.get("expr") is not None:
        expr = rule["expr"]
        yield "expr off by one", {**rule, "expr": f"({expr}) + 1"}
        yield "expr negated", {**rule, "expr": f"not ({expr})"}
    if "absent" in rule:
        yield "absent dropped", {**rule, "absent": ...}
        other = not rule["absent"] if isinstance(rule["absent"], bool) else 7
        yield "absent other", {**rule, "absent": other}
    if "equal" in rule:
        yield "equal other", {**rule, "equal": "chunked_attention"}
    if "record" in rule:
        yield "record dropped", {**rule, "record": ...}
    if "older" in rule:
        yield "older dropped", {**rule, "older": ...}
        older = {**rule["older"], "value": not rule["older"]["value"]}
        yield "older other", {**rule, "older": older}


def _serves(serves: Raw, own: set[str]) -> Iterator[tuple[str, Raw]]:
    if "architecture" in own:
        for other in REFERENCES:
            if other != serves["architecture"]:
                yield f"architecture {other}", {**serves, "architecture": other}
    if "algorithm" in own:
        algorithm = "EAGLE" if serves["algorithm"] != "EAGLE" else "EAGLE3"
        yield "algorithm other", {**serves, "algorithm": algorithm}
    if "since" in own:
        yield "since lower", {**serves, "since": _before(serves["since"])}
    yield "plugin other", {**serves, "plugin": not serves.get("plugin", False)}
    if "layers" in own:
        yield "layers dropped", {**serves, "layers": ...}
        yield "layers other", {**serves, "layers": ["qwen3"]}
        both = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
        yield "layers all", {**serves, "layers": both}
    if "replaces" in own:
        yield "replaces dropped", {**serves, "replaces": ...}
    for at in range(0, len(serves["launch"]) if "launch" in own else 0, 2):
        flag = serves["launch"][at]
        launch = serves["launch"][:at] + serves["launch"][at + 2 :]
        yield f"{flag} dropped", {**serves, "launch": launch}
        launch = [*serves["launch"][: at + 1], "7", *serves["launch"][at + 2 :]]
        yield f"{flag} other", {**serves, "launch": launch}
