"""Text for people: plans, results, tensors. Made here, printed by ``cli`` alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_export.artifact.manifest import Leg, Manifest
    from spec_export.check import CheckResult
    from spec_export.finalize import FinalizeResult


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A plain table, as wide as it needs to be."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    made = Table(*columns, box=SIMPLE, pad_edge=False)
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    out = io.StringIO()
    wide = 10_000  # a name that is cut can be neither read nor searched for
    Console(file=out, width=wide, color_system=None).print(made)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join(line for line in lines if line)


def size(count: int) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.2f} GB"


def plan_json(result: CheckResult) -> dict[str, Any]:
    """The plan of ``check --json``."""
    plan = result.plan
    return {
        "template": plan.template,
        "architecture": plan.architecture,
        "algorithm": plan.algorithm,
        "reasons": plan.reasons,
        "launch": plan.launch,
        "notes": plan.notes,
        "source_bytes": result.source_bytes,
        "export_bytes": result.export_bytes,
        "tensors": [
            {
                "source": f.source,
                "fate": f.fate,
                "to": list(f.to),
                "shape": list(f.shape),
                "reason": f.reason,
            }
            for f in plan.fates
        ],
        "provided_by_target": [p.name for p in plan.from_target],
        "config": plan.config,
    }


def plan_text(result: CheckResult) -> str:
    """The plan for a person."""
    plan = result.plan
    if not plan.fates:
        return ""
    rows = [
        (f.source, f.fate, ", ".join(f.to) or f.reason or "", list(f.shape))
        for f in plan.fates
    ]
    lines = [
        table(("speculators", "fate", "SGLang", "shape"), rows),
        (
            f"{plan.architecture}: {size(result.export_bytes)} of "
            f"{size(result.source_bytes)} written"
        ),
        f"needs SGLang >= {plan.min_version}, because of {'; '.join(plan.reasons)}",
    ]
    if plan.requires_plugin:
        lines.append("needs the serving plug-in: pip install spec-export on the server")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def final_text(result: FinalizeResult) -> str:
    """What ``finalize`` made."""
    from spec_export.serving.launch import launch_line

    lines = [f"took {result.source['path']}: {result.source['why']}"]
    lines += [
        f"{role:>8}: {len(names)} tensors"
        for role, names in roles(result.manifest).items()
    ]
    lines += comparison_lines(result.manifest)
    lines.append(f"final export: {result.output}")
    lines.append(launch_line(result.manifest, result.output, None))
    return "\n".join(lines)


def legs(manifest: Manifest) -> list[tuple[str, Leg]]:
    """The legs in the order they run; in a manifest's file that is the alphabet's."""
    held = manifest.comparison
    return [(n, held[n]) for n in ("cast", "layout", "engine") if n in held]


def comparison_lines(manifest: Manifest) -> list[str]:
    """One line for each leg of the comparison."""
    lines = []
    for name, leg in legs(manifest):
        if not leg.ran:
            lines.append(f"{name:>8}: not run ({leg.reason})")
            continue
        if leg.prompts:
            lines.append(f"{name:>8}: {leg.verdict}, {engine_facts(leg)}")
            continue
        worst = max((s["max_rel"] for s in leg.metrics or []), default=0.0)
        allowed = (leg.tolerance or {}).get("max_rel")
        lines.append(
            f"{name:>8}: {leg.verdict}, max difference {worst:.2e} of the logit range"
            f" (allowed {allowed:.2e}), {leg.positions} positions x {leg.steps} steps"
        )
    if accepted := acceptance_text(manifest):
        lines.append(f"acceptance length: {accepted}")
    return lines


def acceptance_text(manifest: Manifest) -> str:
    """The acceptance lengths of the training and the serving side; "" without any."""
    leg = manifest.comparison.get("layout")
    means = {} if leg is None else leg.acceptance or {}
    for basis, by in (
        ("target_greedy", "by the target's greedy choice"),
        ("text", "by the text itself"),
    ):
        sides = [means.get(f"{side}_vs_{basis}") for side in ("training", "serving")]
        if None not in sides:
            return (
                f"{sides[0]:.2f} tokens per round as trained, {sides[1]:.2f} as "
                f"served, {by}, along recorded text"
            )
    return ""


def engine_facts(leg: Leg) -> str:
    """What the real engine did, of a leg that ran it."""
    equal = sum(p["served"] == p["expected"] for p in leg.prompts)
    mean = (leg.acceptance or {}).get("serving", 0.0)
    return (
        f"SGLang {leg.sglang} on {leg.device} in {leg.dtype}: rounds as in training on "
        f"{equal} of {len(leg.prompts)} random prompts, acceptance length {mean:.2f}"
    )


def show_text(manifest: Manifest) -> str:
    """``spec-export show``."""
    lines = [f"{name:>11}: {value}" for name, value in facts_for_screen(manifest)]
    lines += [
        f"{role:>11}: {', '.join(names)}" for role, names in roles(manifest).items()
    ]
    lines += [
        f"from target: {p.name} {list(p.shape)}" for p in manifest.provided_by_target
    ]
    return "\n".join(lines)


def tensor_text(manifest: Manifest) -> str:
    """``spec-export show --tensors``."""
    rows = [
        (
            name,
            t.role or "unknown",
            ", ".join(t.source),
            t.dtype,
            list(t.shape),
            t.sha256[:12],
        )
        for name, t in manifest.tensors.items()
    ]
    columns = ("tensor", "role", "source", "dtype", "shape", "sha256")
    return table(columns, rows)


def diff_text(found: Sequence[dict[str, Any]]) -> str:
    """``spec-export diff``."""
    if not found:
        return "no differences"
    rows = [(d["kind"], d["name"], _short(d["a"]), _short(d["b"])) for d in found]
    return table(("kind", "name", "a", "b"), rows)


def _short(value: Any) -> str:
    if isinstance(value, dict) and "sha256" in value:
        return f"{value['dtype']} {value['shape']} {value['sha256'][:12]}"
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."


def roles(manifest: Manifest) -> dict[str, list[str]]:
    """Tensor names by role, ``unknown`` where nothing tells."""
    out: dict[str, list[str]] = {}
    for name, tensor in manifest.tensors.items():
        out.setdefault(tensor.role or "unknown", []).append(name)
    return {role: sorted(names) for role, names in sorted(out.items())}


def facts_for_screen(manifest: Manifest) -> list[tuple[str, Any]]:
    """The lines of ``spec-export show``."""
    serving, training = manifest.serving, manifest.training
    compared = ", ".join(f"{name} {leg.verdict}" for name, leg in legs(manifest))
    return [
        ("status", manifest.status),
        ("class", serving.architecture),
        ("SGLang", f">= {serving.min_version} ({'; '.join(serving.reasons)})"),
        ("plug-in", "required" if serving.requires_plugin else "not needed"),
        ("target", manifest.target_model.name or "unknown"),
        ("vocabulary", f"{manifest.vocab.draft_size} of {manifest.vocab.target_size}"),
        ("step", training.global_step),
        ("comparison", compared or "none"),
        ("acceptance", acceptance_text(manifest) or "not measured"),
        ("deviations", ", ".join(d.code for d in manifest.deviations) or "none"),
    ]
