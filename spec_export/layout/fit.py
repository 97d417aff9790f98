"""Whether a draft fits the target it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_export.findings import error, warning
from spec_export.layout.plan_types import Plan
from spec_export.layout.served_dtype import dtype_flag
from spec_export.layout.target_rope import unread_rope
from spec_export.layout.targets import TargetFacts, context_length


def fit_target(
    target: TargetFacts,
    values: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Hold a draft's sizes, context and dtype against its target's, and that itself.

    Args:
        target: The one it was trained with.
        values: Variables of the template.
        plan: Gets findings, and what the launch line needs.
    """
    hint = "give the target that the draft was trained with (--target DIR)"
    if values.get("H") != target.hidden_size:
        plan.findings.append(
            error(
                "target-hidden-size",
                "transformer_layer_config.hidden_size",
                f"is {values.get('H')}, the target's hidden_size is "
                f"{target.hidden_size}",
                hint,
            )
        )
    if values.get("V") != target.vocab_size:
        plan.findings.append(
            error(
                "config-invalid",
                "transformer_layer_config.vocab_size",
                f"is {values.get('V')}, the target's vocab_size is {target.vocab_size}",
                hint,
            )
        )
    mine = context_length(plan.config)
    if mine < target.context_length:
        plan.findings.append(
            warning(
                "context-too-short",
                "transformer_layer_config.max_position_embeddings",
                f"gives the draft a context of {mine} tokens, the target has "
                f"{target.context_length}; SGLang refuses to start",
                f"start the server with --context-length {mine}, or set "
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            )
        )
    argv, problems = dtype_flag(plan.config, target.config)
    plan.launch += argv
    plan.findings += [*problems, *unread_rope(target.config)]
