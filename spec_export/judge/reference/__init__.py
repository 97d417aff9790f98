"""SGLang's draft classes in plain torch, one file per family.

A family adds a file and one line to ``REFERENCES``.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from spec_export.judge.reference.block import BlockReference
    from spec_export.judge.reference.eagle3 import Eagle3Reference
    from spec_export.judge.reference.mtp import MtpReference

    Reference = Eagle3Reference | BlockReference | MtpReference

# architectures[0] of config.json -> module and class.
REFERENCES = {
    "LlamaForCausalLMEagle3": ("eagle3", "Eagle3Reference"),
    "SpecExportEagle3ForCausalLM": ("eagle3", "PluginEagle3Reference"),
    "DFlashDraftModel": ("block", "BlockReference"),
    "DFlash2DraftModel": ("block", "BlockReference"),
    "Qwen3DSparkModel": ("block", "BlockReference"),
    # A folder for MTP has its target's class, which SGLang replaces.
    **dict.fromkeys(
        (
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        ("mtp", "MtpReference"),
    ),
}


def load_reference(
    folder: Path,
    *,
    embed: torch.Tensor | None,
    head: torch.Tensor | None = None,
    release: str = "0.5.23",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    window: int | None = None,
) -> Reference:
    """Load an export folder as SGLang would.

    Args:
        folder: The export: its config.json and safetensors are all that is read.
        embed: The target's embedding [vocabulary, H].
        head: The target's head, where SGLang takes it from there.
        release: The SGLang release whose rules apply.
        dtype: Dtype of the computation, float32 by default.
        device: Where to compute.
        window: ``--speculative-draft-window-size`` of the launch line.

    Raises:
        ServingError: SGLang would refuse the folder.
        ReferenceUnsupported: no reference for this architecture or configuration.
    """
    import torch

    from spec_export.judge.reference.serving_config import (
        ReferenceUnsupported,
        ServingError,
    )

    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as problem:
        raise ServingError(f"config.json cannot be read: {problem}") from problem
    architectures = raw.get("architectures")
    if not architectures:
        raise ServingError("config.json names no architecture")
    if architectures[0] not in REFERENCES:
        raise ReferenceUnsupported(
            f"no serving reference for architecture {architectures[0]!r}; there is one "
            f"for {', '.join(REFERENCES)}"
        )
    module, name = REFERENCES[architectures[0]]
    if raw.get("quantization_config") and module != "mtp":  # a whole target may be
        raise ReferenceUnsupported(
            "config.json has a quantization_config, by which SGLang reads the weights"
        )
    cls = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    reference: Reference = cls(
        folder,
        raw,
        embed=embed,
        head=head,
        release=release,
        dtype=dtype or torch.float32,
        device=torch.device(device),
        window=window,
    )
    return reference
