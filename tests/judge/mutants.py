"""Drafts that together exercise every rule, and mutants of what is made of them.

A mutant is caught by the plan (an error finding) or by the judge (a failed leg; one
that could not run is no verdict). What is judged went through the pipeline's own plan
and writing, with values of speculators' own module. The drafts of each family are in
``mutant_cases_*.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from spec_export.artifact.manifest import METADATA_KEY
from spec_export.comparison import as_torch, window_of
from spec_export.export import _blocks
from spec_export.judge import Inputs, Leg, layout_leg, training_module
from spec_export.judge.reference import REFERENCES
from spec_export.layout import plan as planning
from spec_export.layout.config import flatten
from spec_export.layout.plan_types import Plan
from spec_export.layout.targets import target_facts
from spec_export.layout.template import Template
from spec_export.layout.tensors import TensorInfo

NEWEST = "0.5.23"
Tensors = dict[str, torch.Tensor]
# Another word of the same kind for a value of config.json.
WORDS = {
    "float32": "bfloat16",
    "llama": "llama4_text",
    "qwen3": "llama",
    "silu": "gelu",
    "vanilla": "gated",
    "gated": "vanilla",
    "rnn": "vanilla",
}
# What a quantised target's config.json says besides.
QUANTISED = {"quantization_config": {"quant_method": "fp8"}}
SAFETENSORS = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Export:
    """What a plan makes of a draft: what lies on disk, and where it may be served."""

    tensors: Tensors
    config: dict[str, Any]
    launch: tuple[str, ...]
    min_version: str


@dataclass
class Case:
    """A draft for one template.

    Attributes:
        name: Says what is special.
        template: Whose rules apply.
        module: speculators' own.
        config: The source's config.json.
        weights: Its tensors in float32, with those that it leaves to the target.
        embed: The target's embedding [vocabulary, H].
        head: The target's head.
        target: The target's config.json.
        refused: Whether the plan has to refuse it, and the judge to fail it if the
            plan does not.
        slim: Tensors that the source leaves to the target.
        allow: Deviations that the user accepts.
        release: The oldest release that the deployers run.
        recipe: What training recorded of its flags.
    """

    name: str
    template: str
    module: Any
    config: dict[str, Any]
    weights: Tensors
    embed: torch.Tensor
    head: torch.Tensor
    target: dict[str, Any]
    refused: bool = False
    slim: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    release: str = NEWEST
    recipe: dict[str, Any] | None = None

    @cached_property
    def values(self) -> Tensors:
        held = self.weights
        return {k: v.contiguous() for k, v in held.items() if k not in self.slim}

    @cached_property
    def inputs(self) -> Inputs:
        return Inputs.for_config(self.config, positions=16, seed=3)

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, SAFETENSORS[value.dtype], tuple(value.shape))
            for name, value in self.values.items()
        }

    def plan(self, template: Template) -> Plan:
        """Plan with one template, in float32."""

        def only(kind: str) -> tuple[Template, ...]:
            return (template,) if template.speculators_type == kind else ()

        with patch.object(planning, "templates", only):
            return planning.make_plan(
                self.config,
                self.infos,
                target_facts(self.target, "own"),
                Version(self.release),
                allow=self.allow,
                dtype="float32",
                recipe=self.recipe,
            )

    @staticmethod
    def outcome(plan: Plan) -> str:
        """What of a plan decides the export."""
        return repr((plan.placements, plan.config, plan.launch, plan.min_version))

    def export(self, plan: Plan) -> Export:
        """What the pipeline writes: each placement by its own code."""
        source: Any = SimpleNamespace(
            read=lambda name: self.values[name].numpy(), tensors=self.infos
        )
        # What a slim source leaves out: the rows of the head that training used.
        target: Any = SimpleNamespace(
            iter_rows=lambda role, rows: [self.weights["lm_head.weight"].numpy()]
        )
        tensors = {}
        for placement in plan.placements:
            blocks = list(_blocks(source, target, placement, "F32", None))
            flat = torch.cat([as_torch(block).reshape(-1) for block in blocks])
            tensors[placement.name] = flat.view(placement.shape)
        return Export(
            tensors,
            json.loads(json.dumps(plan.config)),
            tuple(plan.launch),
            plan.min_version,
        )

    def judge(self, export: Export, folder: Path, release: str) -> Leg:
        """The layout leg, as ``finalize`` runs it."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(export.config))
        embedded = json.dumps({"serving": {"launch": list(export.launch)}})
        held = {k: v.clone().contiguous() for k, v in export.tensors.items()}
        save_file(held, folder / "model.safetensors", {METADATA_KEY: embedded})
        return layout_leg(
            folder,
            self.module,
            self.inputs,
            embed=self.embed,
            head=self.head,
            release=release,
            window=window_of(folder),
            target_config=self.target,
        )

    def caught(self, export: Export, folder: Path) -> str:
        """Who says no to an export; empty: nobody.

        Judged for the release that was asked for, and for the lowest that the export
        claims. SGLang raising while it loads counts as the judge's.
        """
        for release in dict.fromkeys((self.release, export.min_version)):
            leg = self.judge(export, folder, release)
            if leg.verdict == "fail":
                return "the judge"
            if not leg.passed:
                return ""
        return ""


def case_of_saved(
    name: str,
    template: str,
    draft: Path,
    target: Path,
    source: Any = (),
    about: Any = (),
    copies: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """A case of a draft that speculators saved; its values become float32.

    ``source`` and ``about`` change what the draft's and the target's config.json say;
    ``copies`` are tensors of the training loss that the source has too.
    """
    config = json.loads((draft / "config.json").read_text())
    tensors = load_file(draft / "model.safetensors")
    weights = {name: unrounded(value) for name, value in tensors.items()}
    lent = load_file(target / "model.safetensors")
    embed, head = (
        next(value for name, value in lent.items() if name.endswith(ending)).float()
        for ending in ("embed_tokens.weight", "lm_head.weight")
    )
    offsets = weights.get("d2t")
    rows = head if offsets is None else head[offsets + torch.arange(len(offsets))]
    shared = {"embed_tokens.weight": embed, "lm_head.weight": rows}
    loss = {"verifier_lm_head.weight": rows, "verifier_norm.weight": head[0]}
    both = weights | shared | {name: loss[name] for name in copies}
    return Case(
        name,
        template,
        training_module(config, both.__getitem__, list(both)),
        changed(config, dict(source)),
        both,
        embed,
        head,
        changed(json.loads((target / "config.json").read_text()), dict(about)),
        slim=() if copies else tuple(shared),
        **more,
    )


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with other values at dotted keys; ``...`` removes one."""
    out: dict[str, Any] = json.loads(json.dumps(config))
    for key, value in changes.items():
        inner: Any = out
        *path, last = key.split(".")
        for part in path:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        if value is ...:
            inner.pop(last, None)
        else:
            inner[last] = value
    return out


def unrounded(value: torch.Tensor) -> torch.Tensor:
    """In float32, moved to what bfloat16 cannot hold: or a wrong dtype is hidden."""
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(value.numel())
    return value.float() * (1 + torch.rand(value.shape, generator=generator) / 300)


# --- mutants of what was written ------------------------------------------------------

Change = Callable[[Export], Export]


def _tensor(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda e: replace(e, tensors={**e.tensors, name: how(e.tensors[name])})


def _drop(name: str) -> Change:
    return lambda e: replace(
        e, tensors={k: v for k, v in e.tensors.items() if k != name}
    )


def _rename(name: str, to: str) -> Change:
    return lambda e: replace(
        e, tensors={to if k == name else k: v for k, v in e.tensors.items()}
    )


def _swap(one: str, other: str) -> Change:
    def change(e: Export) -> Export:
        both = {one: e.tensors[other], other: e.tensors[one]}
        return replace(e, tensors={**e.tensors, **both})

    return change


def tensor_mutants(export: Export) -> Iterator[tuple[str, Change]]:
    """Each tensor dropped, swapped, transposed, shifted, stale, in a wrong dtype."""
    for name, value in export.tensors.items():
        yield f"{name}: dropped", _drop(name)
        # SGLang takes any name with "d2t" in it.
        yield f"{name}: renamed", _rename(name, f"x{name}".replace("d2t", "map"))
        alike = [o for o, its in export.tensors.items() if its.shape == value.shape]
        other = alike[(alike.index(name) + 1) % len(alike)]
        if other != name:
            yield f"{name}: swapped with {other}", _swap(name, other)
        for how, changed_as in _changes(value):
            other = changed_as(value)
            if other.dtype != value.dtype or not torch.equal(other, value):
                yield f"{name}: {how}", _tensor(name, changed_as)


def _changes(
    value: torch.Tensor,
) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """What can be done to a tensor; some of it changes nothing in a constant one."""
    yield "one value", _one_value
    if value.is_floating_point():
        yield "stale", _stale
        yield "as bfloat16", torch.Tensor.bfloat16
        yield "as float16", torch.Tensor.half
    else:
        yield "stale", lambda t: t.roll(3)
        yield "absolute", lambda t: t + torch.arange(len(t))
        yield "as float", torch.Tensor.float
    for dim in range(value.ndim):
        yield f"axis {dim} off by one", lambda t, d=dim: t.roll(1, d)  # type: ignore[misc]
    if value.ndim == 2:
        yield "transposed", lambda t: t.T.reshape(t.shape)


def _stale(t: torch.Tensor) -> torch.Tensor:
    """A few thousandths away, each by another share: a norm takes a scale away."""
    return t * torch.linspace(1, 1.006, t.numel()).view(t.shape)


def _one_value(t: torch.Tensor) -> torch.Tensor:
    """The value in the middle changes by half of what is usual, or by one."""
    out = t.clone()
    usual = t.square().mean().sqrt() / 2 if t.is_floating_point() else 1
    out.view(-1)[t.numel() // 2] += usual
    return out


def config_mutants(export: Export) -> Iterator[tuple[str, Change]]:
    """Each key dropped, null, off by one, with the wrong flag, with a stale value."""
    for key, value in flatten(export.config).items():
        for how, other in [("dropped", ...), ("null", None), *_others(key, value)]:
            if other != value:
                yield f"{key}: {how}", _set(key, other)


def _others(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, bool):
        return [("wrong flag", not value)]
    if isinstance(value, int):
        return [("off by one", value + 1), ("stale", value * 2)]
    if isinstance(value, float):
        return [("off by one", value + 1), ("stale", value * 1.1)]
    if isinstance(value, str):
        return [("stale", WORDS.get(value, "other"))]
    if isinstance(value, list) and value and isinstance(value[0], int):
        moved = [v + 1 for v in value]
        return [("off by one", moved), ("shorter", value[:-1])]
    if isinstance(value, list) and len(value) > 1:
        return [("swapped", value[::-1])]
    if isinstance(value, list) and value and value[0] in REFERENCES:
        family = REFERENCES[value[0]][0]
        classes = [name for name, (module, _) in REFERENCES.items() if module == family]
        return [("other", [classes[classes.index(value[0]) - 1]])]
    return []


def _set(key: str, value: Any) -> Change:
    return lambda e: replace(e, config=changed(e.config, {key: value}))


def launch_mutants(export: Export) -> Iterator[tuple[str, Change]]:
    """Each flag of the launch line dropped, with another value, a number off by one."""
    launch = export.launch
    for at in (i for i, word in enumerate(launch) if word.startswith("--")):
        flag, after = launch[at], launch[at + 1 : at + 2]
        takes = bool(after) and not after[0].startswith("--")
        less = launch[:at] + launch[at + 1 + takes :]
        yield f"{flag}: dropped", _launch(less)
        if takes:
            number = after[0].isdigit()
            other = str(int(after[0]) + 1) if number else "other"
            how = "off by one" if number else "other"
            more = (*launch[: at + 1], other, *launch[at + 2 :])
            yield f"{flag}: {how}", _launch(more)


def _launch(launch: tuple[str, ...]) -> Change:
    return lambda e: replace(e, launch=launch)
