"""Where a failed comparison goes wrong first, and what explains it.

Both sides are run once more with every intermediate value kept; stages are compared in
the order in which a draft step computes them. The first stage that differs has equal
inputs, so the fault is in its own tensor or configuration key.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from spec_export.judge.explain import Case, explain
from spec_export.judge.inputs import Inputs
from spec_export.judge.probe import drafting_module, training_logits
from spec_export.judge.reference.eagle3 import Eagle3Reference

Values = dict[tuple[int, str], torch.Tensor]

# Stages of a step in order; of a layer in order.
_BEFORE = ("features norm", "feature norm", "fused features", "recurrent state")
_LAYER = (
    "embedding norm",
    "input norm",
    "q",
    "k",
    "v",
    "q norm",
    "k norm",
    "attention",
    "attention output",
    "post-attention norm",
    "MLP gate",
    "MLP up",
    "MLP output",
)
# Module of the training class -> stage.
_MODULES = {
    "embed_tokens": "embedding",
    "input_norm": "features norm",
    "norm": "final norm",
    "lm_head": "logits",
    "layers.0.hidden_norm.in": "recurrent state",
    "layers.0.input_layernorm": "layer 0 embedding norm",
    "layers.0.hidden_norm": "layer 0 input norm",
}
_LAYER_MODULES = {
    "input_layernorm": "input norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.q_norm": "q norm",
    "self_attn.k_norm": "k norm",
    "self_attn.o_proj.in": "attention",
    "self_attn.o_proj": "attention output",
    "post_attention_layernorm": "post-attention norm",
    "mlp.gate_proj": "MLP gate",
    "mlp.up_proj": "MLP up",
    "mlp.down_proj": "MLP output",
}


def diagnose(
    module: Any,
    reference: Eagle3Reference,
    inputs: Inputs,
    steps: int,
    tolerance: float,
    saved: torch.dtype,
) -> list[str]:
    """Name the first stage that differs and what explains it.

    Args:
        module: The training side.
        reference: The serving side.
        inputs: The rows of the comparison.
        steps: Chained draft steps.
        tolerance: Of the comparison, relative to the range of a stage's values.
        saved: Dtype at which the training side's weights are compared.

    Returns:
        Sentences; the first one starts with ``first difference:``. Empty if no stage
        differs (the logits agree).
    """
    draft = drafting_module(module)
    rows = inputs.rows()
    training = _training_values(module, inputs, steps, rows)
    serving = _serving_values(reference, inputs, steps)
    for step in range(steps):
        stages = {stage for at, stage in training.keys() | serving.keys() if at == step}
        for stage in sorted(stages, key=_order):
            key = (step, stage)
            if _agree(training.get(key), serving.get(key), tolerance):
                continue
            where = stage if step == 0 else f"step {step}, {stage}"
            sides = (key in training, key in serving)
            case = Case(draft, reference, inputs, saved, stage, *sides)
            return [f"first difference: {where}; {explain(case)}"]
    return []


# --- both sides' values -------------------------------------------------------------


def _stage_of(module_name: str) -> str | None:
    if module_name in _MODULES:
        return _MODULES[module_name]
    if module_name == "fc":
        return "fused features"
    if match := re.fullmatch(r"fc_norm\.(\d+)", module_name):
        return f"feature norm {match[1]}"
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", module_name):
        part = _LAYER_MODULES.get(match[2])
        return f"layer {match[1]} {part}" if part else None
    return None


def _training_values(module: Any, inputs: Inputs, steps: int, rows: Any) -> Values:
    values: Values = {}
    step = 0

    def keep(name: str, value: torch.Tensor) -> None:
        nonlocal step
        stage = _stage_of(name)
        if stage is None or (stage == "recurrent state" and step == 0):
            return
        if name == "layers.0.hidden_norm.in" or value.ndim > 1:
            values[step, stage] = value.flatten(1)[rows.to(value.device)].cpu()
        if name == "lm_head":
            step += 1

    training_logits(module, inputs, steps, on_output=keep)
    return values


def _serving_values(reference: Eagle3Reference, inputs: Inputs, steps: int) -> Values:
    values: Values = {}

    def keep(step: int, stage: str, value: torch.Tensor) -> None:
        values[step, stage] = value.cpu()

    reference.teacher_forced(
        inputs.token_ids,
        inputs.aux,
        inputs.position_ids,
        inputs.document_ids,
        steps,
        keep,
    )
    return values


def _order(stage: str) -> tuple[int, int, int]:
    if match := re.fullmatch(r"layer (\d+) (.+)", stage):
        return 2, int(match[1]), _LAYER.index(match[2])
    if match := re.fullmatch(r"feature norm (\d+)", stage):
        return 0, _BEFORE.index("feature norm"), int(match[1])
    if stage in _BEFORE:
        return 0, _BEFORE.index(stage), 0
    return {"embedding": (1, 0, 0), "final norm": (3, 0, 0), "logits": (4, 0, 0)}[stage]


def _agree(
    training: torch.Tensor | None, serving: torch.Tensor | None, tolerance: float
) -> bool:
    if training is None or serving is None or training.shape != serving.shape:
        return False
    a, b = training.double(), serving.double()
    apart = (a - b).abs().max().item()
    return not math.isnan(apart) and apart <= tolerance * max(_range(a), 1e-30)


def _range(values: torch.Tensor) -> float:
    return (values.max() - values.min()).item()
