"""Drafts that together exercise every rule, and mutants of what is made of them.

A mutant is caught by the plan (an error finding) or by the judge (a failed leg). What
is judged went through the pipeline's own plan and writing, with values of speculators'
own module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from drafts import THETA, Draft, make_draft
from packaging.version import Version
from safetensors.torch import save_file
from transformers import Qwen3Config

from spec_export.artifact.manifest import METADATA_KEY
from spec_export.comparison import as_torch, window_of
from spec_export.export import _blocks
from spec_export.findings import SpecExportError
from spec_export.judge import Inputs, Leg, layout_leg
from spec_export.layout.config import flatten
from spec_export.layout.plan import plan_with
from spec_export.layout.plan_types import Plan
from spec_export.layout.targets import target_facts
from spec_export.layout.template import Template
from spec_export.layout.tensors import TensorInfo

NEWEST = "0.5.23"
Tensors = dict[str, torch.Tensor]
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    **THETA,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 256,
}
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
        draft: speculators' module with its configuration.
        source: Keys of the source's config.json that differ from the module's.
        refused: Whether the plan has to refuse it, and the judge to fail it if the
            plan does not.
        slim: Tensors that the source leaves to the target.
    """

    name: str
    template: str
    draft: Draft
    source: Mapping[str, Any]
    refused: bool = False
    slim: tuple[str, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any]:
        merged = json.loads(json.dumps(self.draft.config))
        for key, value in self.source.items():
            inner = merged
            *path, last = key.split(".")
            for part in path:
                inner = inner[part]
            inner[last] = value
        return merged

    @cached_property
    def values(self) -> Tensors:
        held = self.draft.weights
        return {k: v.contiguous() for k, v in held.items() if k not in self.slim}

    @cached_property
    def inputs(self) -> Inputs:
        return self.draft.inputs(positions=16)

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, SAFETENSORS[value.dtype], tuple(value.shape))
            for name, value in self.values.items()
        }

    def plan(self, template: Template) -> Plan:
        """Plan with a template, in float32, for the newest release."""
        return plan_with(
            template,
            self.config,
            self.infos,
            target_facts(TARGET, "own"),
            Version(NEWEST),
            dtype="float32",
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
        head = self.draft.weights["lm_head.weight"]
        target: Any = SimpleNamespace(iter_rows=lambda role, rows: [head.numpy()])
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

    def judge(self, export: Export, folder: Path, release: str = NEWEST) -> Leg:
        """The layout leg, as ``finalize`` runs it."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(export.config))
        embedded = json.dumps({"serving": {"launch": list(export.launch)}})
        held = {k: v.clone().contiguous() for k, v in export.tensors.items()}
        save_file(held, folder / "model.safetensors", {METADATA_KEY: embedded})
        return layout_leg(
            folder,
            self.draft.module,
            self.inputs,
            embed=self.draft.embed,
            head=self.draft.weights["lm_head.weight"],
            release=release,
            window=window_of(folder),
            target_config=TARGET,
        )


def sliding(kinds: str, size: int) -> dict[str, Any]:
    """Window keys of a layer config: ``sf`` is one sliding and one full layer."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {"layer_types": [names[k] for k in kinds], "sliding_window": size}


def servable() -> list[Case]:
    """Drafts that have an exact export."""
    stock, plugin = "eagle3-llama", "eagle3-plugin"
    return [
        Case("plain", stock, make_draft(1, layer={"head_dim": 16}), {}),
        Case("before", stock, make_draft(1, norm_before_fc=True), {}),
        Case(
            "two",
            stock,
            make_draft(2, aux_ids=(1, 3, 4, 6), fc_norm=True, norm_output=True),
            {},
        ),
        Case(
            "whole",
            stock,
            make_draft(1, 96, rope=LLAMA3, layer=sliding("s", 4)),
            {"tie_word_embeddings": True, "quantization_config": {"bits": 4}},
        ),
        Case(
            "slim",
            stock,
            make_draft(1, 64, layer={"num_key_value_heads": 4}),
            {},
            slim=("lm_head.weight", "embed_tokens.weight"),
        ),
        Case(
            "all",
            plugin,
            make_draft(
                2,
                arch=Qwen3Config,
                norm_before_residual=True,
                norm_output=True,
                layer={
                    "attention_bias": True,
                    "use_sliding_window": True,
                    **sliding("sf", 4),
                },
            ),
            {},
        ),
        Case(
            "biases",
            plugin,
            make_draft(
                2,
                norm_before_fc=True,
                layer={"attention_bias": True, "mlp_bias": True},
            ),
            {},
        ),
        Case(
            "feature",
            plugin,
            make_draft(1, 96, aux_ids=(3,), fc_norm=True, layer={"head_dim": 16}),
            {},
        ),
    ]


def alone() -> list[Case]:
    """Drafts with one feature each, so that no other one demands its release too."""
    made = {
        "layers": make_draft(2),
        "four": make_draft(1, aux_ids=(1, 3, 4, 6)),
        "fc_norm": make_draft(1, fc_norm=True),
        "output": make_draft(1, norm_output=True),
    }
    return [Case(name, "eagle3-llama", draft, {}) for name, draft in made.items()]


def refused() -> list[Case]:
    """Drafts that stock SGLang would compute wrongly: one for each refusal."""
    stock = "eagle3-llama"
    made = {
        "norm_before_residual": make_draft(1, norm_before_residual=True),
        "gelu": make_draft(1, layer={"hidden_act": "gelu"}),
        "mixed": make_draft(2, layer=sliding("sf", 4)),
        "feature": make_draft(1, aux_ids=(3,)),
        "qwen3": make_draft(1, arch=Qwen3Config),
        "attention bias": make_draft(1, layer={"attention_bias": True}),
        "mlp bias": make_draft(1, layer={"mlp_bias": True}),
    }
    plugged = Case("gelu", "eagle3-plugin", made["gelu"], {}, refused=True)
    cases = [Case(name, stock, draft, {}, refused=True) for name, draft in made.items()]
    return [*cases, plugged]


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
        if value.is_floating_point():
            yield f"{name}: stale", _tensor(name, lambda t: t * 1.003)
            yield f"{name}: as bfloat16", _tensor(name, torch.Tensor.bfloat16)
            yield f"{name}: as float16", _tensor(name, torch.Tensor.half)
            yield f"{name}: one value", _tensor(name, _one_value)
        else:
            yield f"{name}: absolute", _tensor(name, lambda t: t + torch.arange(len(t)))
            yield f"{name}: as float", _tensor(name, torch.Tensor.float)
            yield f"{name}: stale", _tensor(name, lambda t: t.roll(3))
            yield f"{name}: one value", _tensor(name, _one_value)
        for dim in range(value.ndim):
            shift = _tensor(name, lambda t, d=dim: t.roll(1, d))
            yield f"{name}: axis {dim} off by one", shift
        if value.ndim == 2:
            turned = _tensor(name, lambda t: t.T.reshape(t.shape))
            yield f"{name}: transposed", turned


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
            yield f"{key}: {how}", _set(key, other)


def _others(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, bool):
        return [("wrong flag", not value)]
    if isinstance(value, int):
        return [("off by one", value + 1), ("stale", value * 2)]
    if isinstance(value, float):
        return [("off by one", value + 1), ("stale", value * 1.1)]
    if isinstance(value, str):
        other = {"float32": "bfloat16", "llama": "llama4_text", "silu": "gelu"}
        return [("stale", other.get(value, "other"))]
    if isinstance(value, list) and value and isinstance(value[0], int):
        moved = [v + 1 for v in value]
        return [("off by one", moved), ("shorter", value[:-1])]
    if isinstance(value, list) and len(value) > 1:
        return [("swapped", value[::-1])]
    return []


def _set(key: str, value: Any) -> Change:
    def change(e: Export) -> Export:
        config = json.loads(json.dumps(e.config))
        inner = config
        *path, last = key.split(".")
        for part in path:
            inner = inner[part]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
        return replace(e, config=config)

    return change


def launch_mutants(export: Export) -> Iterator[tuple[str, Change]]:
    """The window of the launch line dropped and off by one."""
    flag = "--speculative-draft-window-size"
    if flag in export.launch:
        at = export.launch.index(flag)
        less = export.launch[:at] + export.launch[at + 2 :]
        yield f"{flag}: dropped", lambda e: replace(e, launch=less)
        size = str(int(export.launch[at + 1]) + 1)
        more = (*export.launch[: at + 1], size, *export.launch[at + 2 :])
        yield f"{flag}: off by one", lambda e: replace(e, launch=more)


def caught(case: Case, export: Export, folder: Path) -> str:
    """Who says no to an export, at the newest or at its lowest release; empty: nobody.

    SGLang raising while it loads counts as the judge's.
    """
    for release in dict.fromkeys((NEWEST, export.min_version)):
        try:
            leg = case.judge(export, folder, release)
        except SpecExportError:
            return "plan"
        if not leg.passed:
            return "judge"
    return ""
