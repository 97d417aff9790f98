"""What logits of given features cannot show: which features, which dtype, how served.

The comparison feeds both sides the same features, so whether SGLang would capture
those of the same layers is held against the configurations here, by SGLang's rules
written down a second time. And rows that cannot tell a right draft from a wrong one
must not end in a pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from spec_export.judge.inputs import Inputs
from spec_export.judge.reference.block import BlockReference
from spec_export.judge.reference.block_config import FAMILIES, made_up_layers
from spec_export.judge.reference.eagle3 import Eagle3Reference
from spec_export.judge.reference.loading import weight_files
from spec_export.judge.reference.serving_config import parse_release
from spec_export.judge.target import language_model

# Targets whose hook does not simply take id k as the output of layer k.
_FIRST_IS_ONE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Glm4MoeLiteForCausalLM",
)
_CONTAINS_LAST = ("GptOssForCausalLM",)
_CAPTURE_POINTS = ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration")
_DEFAULT_MOVED = ("MiniMaxM3SparseForConditionalGeneration",)
_ALGORITHMS = {
    "LlamaForCausalLMEagle3": ("EAGLE3",),
    "SpecExportEagle3ForCausalLM": ("EAGLE3",),
    "DFlashDraftModel": ("DFLASH",),
    "DFlash2DraftModel": ("DFLASH",),
    "Qwen3DSparkModel": ("DSPARK",),
}
_QUANTIZATION = "--speculative-draft-model-quantization"
_TOGETHER = {
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def trained_layers(config: Any) -> list[int] | None:
    """The layers after which training took its features; None: no such setting."""
    for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        ids = getattr(config, key, None)
        if ids is not None:
            return sorted(int(i) for i in ids)
    return None


def captured_layers(
    config: Mapping[str, Any], target: Mapping[str, Any], release: str
) -> list[int] | None:
    """After how many layers SGLang's target takes each feature for a draft.

    Args:
        config: The export's ``config.json``.
        target: The target's.
        release: SGLang release.

    Returns:
        In the order of the features; None where the draft family does not say it in
        one of the two places that are known here.
    """
    depth = int(language_model(target)["num_hidden_layers"])
    architecture = (target.get("architectures") or [""])[0]
    number = parse_release(release)
    if (config.get("architectures") or [""])[0] in FAMILIES:
        block = config.get("dflash_config") or {}
        ids = block.get("target_layer_ids", config.get("target_layer_ids"))
        ids = ids or made_up_layers(depth, int(config["num_hidden_layers"]))
        # This target's hook counts residuals; the runner adds one for DFlash2 alone.
        as_they_are = architecture in _CAPTURE_POINTS and config["architectures"] != [
            "DFlash2DraftModel"
        ]
        return sorted(k + (not as_they_are) for k in ids)
    if "Eagle3" not in (config.get("architectures") or [""])[0]:
        return None
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        return [depth]
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        moved = int(architecture in _DEFAULT_MOVED)
        return [k + moved for k in (2, depth // 2, depth - 3)]
    plain = True
    if architecture in _FIRST_IS_ONE and number >= (0, 5, 13, 0):
        plain = ids[0] == 1
    if architecture in _CONTAINS_LAST and number >= (0, 5, 17, 0):
        plain = max(ids) != depth
    return sorted(k + 1 if plain else k for k in ids)


def capture_problems(
    folder: Path,
    target: Mapping[str, Any] | None,
    trained: Sequence[int] | None,
    release: str,
) -> list[str]:
    """Whether the target would hand over the features that training used."""
    if target is None or trained is None:
        return []
    if "num_hidden_layers" not in language_model(target):
        return []
    config = json.loads((folder / "config.json").read_text())
    found = captured_layers(config, target, release)
    if found is None or found == sorted(trained):
        return []
    where = "config key eagle_config or dflash_config"
    said = f"SGLang would take the features after layers {found}, training took them"
    return [f"{said} after {sorted(trained)} ({where})"]


def config_of(target: Path | None) -> dict[str, Any] | None:
    """A target's configuration; None without one."""
    if target is None or not (target / "config.json").is_file():
        return None
    found = json.loads((target / "config.json").read_text())
    if not isinstance(found, dict):
        return None
    beside = target / "hf_quant_config.json"  # where ModelOpt may say what it did
    if found.get("quantization_config") is None and beside.is_file():
        said = json.loads(beside.read_text())
        said = said.get("quantization", said) if isinstance(said, dict) else None
        if isinstance(said, dict) and said.get("quant_algo"):
            found["quantization_config"] = said
    return found


def launch_problems(
    folder: Path, target: Mapping[str, Any] | None, release: str
) -> list[str]:
    """Whether a server started with the export's launch line computes the draft.

    Args:
        folder: The export; one without our manifest has no launch line.
        target: The target's ``config.json``.
        release: The SGLang release that the line is for.
    """
    launch = _launch_of(folder)
    if launch is None:
        return []
    about = target or {}
    text = language_model(about)
    config = json.loads((folder / "config.json").read_text())
    name, number = config["architectures"][0], parse_release(release)
    given = dict(pairwise([*launch, ""]))
    algorithm = given.get("--speculative-algorithm")
    problems = []
    if algorithm not in _ALGORITHMS.get(name, ("NEXTN", "EAGLE")):
        problems.append(f"the launch line starts {algorithm}, not what {name} is for")
    if given.get("--speculative-draft-model-path") != "{draft}":
        problems.append("the launch line does not start this draft")
    if 0 < len(_TOGETHER - set(given)) < len(_TOGETHER):
        missing = ", ".join(sorted(_TOGETHER - set(given)))
        problems.append(f"SGLang does not start without {missing} beside the others")
    method = given.get(_QUANTIZATION)
    quantised = {**about, **text}.get("quantization_config")
    if method != "unquant" and (method or (quantised and number >= (0, 5, 7, 0))):
        # Else it inherits --quantization.
        problems.append(f"the launch line lacks {_QUANTIZATION} unquant")
    mine, theirs = _auto_dtype(config), _auto_dtype(about)
    if mine and theirs and given.get("--dtype", mine) != theirs:
        problems.append(
            f"the launch line lacks --dtype {theirs}: SGLang would compute the draft "
            f"in {given.get('--dtype', mine)}"
        )
    if number < (0, 5, 11, 0) and "--disable-cuda-graph" not in launch:
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        depth = text.get("num_hidden_layers")
        if ids and depth and sorted(ids) != [1, depth // 2 - 1, depth - 4]:
            problems.append(f"SGLang {release} resets the layer ids for CUDA graphs")
    return problems


def _auto_dtype(config: Mapping[str, Any]) -> str | None:
    """What SGLang's ``--dtype auto`` makes of a configuration."""
    text = language_model(config)
    keys = ("dtype", "torch_dtype")
    found = next((c[k] for c in (text, config) for k in keys if c.get(k)), None)
    if found != "float32":
        return found
    kind = str(text.get("model_type") or config.get("model_type"))
    return "bfloat16" if kind.startswith("gemma") else "float16"


def _launch_of(folder: Path) -> list[str] | None:
    """The launch line in the part of the manifest that travels with the weights."""
    with safe_open(weight_files(folder)[0], framework="pt") as handle:
        embedded = (handle.metadata() or {}).get("spec_export.manifest")
    try:
        found = json.loads(embedded or "")["serving"]["launch"]
    except (ValueError, KeyError, TypeError):
        return None  # a broken manifest has its own findings
    return found if isinstance(found, list) else None


def window_problems(reference: Any, config: Any) -> list[str]:
    """Windows of attention, which the documents of a comparison may not reach.

    Args:
        reference: The serving side, with the window of the launch line.
        config: Of the draft in training.
    """
    layer = config.transformer_layer_config
    kinds = getattr(layer, "layer_types", None) or []
    size = getattr(layer, "sliding_window", None) or math.inf
    context = layer.max_position_embeddings - 1  # what reaches further is no window
    for i in range(reference.config.num_layers):
        slides = i < len(kinds) and kinds[i] == "sliding_attention"
        trained = size - 1 if slides else math.inf  # it counts the query itself
        if isinstance(reference, BlockReference):
            found = reference.config.windows[i]
        else:
            found = reference.window_of(i)
        served = math.inf if found is None else found
        if min(served, context) != min(trained, context):
            said = f"layer {i} sees {served} positions back in SGLang, {trained} in"
            return [f"{said} training (launch line, config.json)"]
    return []


def dtype_problems(folder: Path, dtype: str) -> list[str]:
    """SGLang casts every tensor to the dtype of config.json: one that is not of it.

    Args:
        folder: The export.
        dtype: What SGLang takes from config.json.
    """
    wrong = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                held = _DTYPES.get(handle.get_slice(name).get_dtype())
                if held is not None and held != dtype:
                    wrong[name] = held
    if not wrong:
        return []
    name = min(wrong)
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    computes = f"SGLang computes in {dtype} (config key dtype)"
    return [f"{name}{more} holds {wrong[name]}, and {computes}"]


def blind_inputs(inputs: Inputs, *, block: bool = False) -> str | None:
    """Why rows cannot tell a right draft from a wrong one; None: they can."""
    rows = inputs.rows()
    if len(rows) < 2:
        return f"{len(rows)} rows that are not padding"
    aux = inputs.aux[rows].double()
    if not bool(aux.isfinite().all()):
        return "the features are not all finite"
    if float((aux - aux[:1]).abs().max()) == 0:
        return "the features of all rows are the same"
    if float((aux - aux[:, :1]).abs().max()) == 0:
        return "the features of a row are the same in all channels"
    if not block and len(inputs.token_ids[rows].unique()) == 1:
        return "the tokens of all rows are the same"
    return None


def blind_logits(logits: Sequence[torch.Tensor], rows: torch.Tensor) -> str | None:
    """Why training's logits say nothing about the draft; None: they do."""
    for step, values in enumerate(logits):
        held = values[rows.to(values.device)].float()
        if not bool(held.isfinite().all()):
            return None  # a failure, not a lack of information
        if float((held - held[:1]).abs().max()) == 0:
            return f"training's logits of step {step} are the same in every row"
    return None


def relabel(reference: Any, wanted: torch.Tensor) -> tuple[str, ...]:
    """Bring the serving side's draft ids into the order of training.

    A draft id is a row of the head and its entry of the token map; both in another
    order are the same draft, which logits compared row by row would not show.

    Args:
        reference: Changed where its draft ids mean the same tokens in another order.
        wanted: Target id of each draft id in training, int64 [draft vocabulary].

    Returns:
        What a reader should know.
    """
    if not isinstance(reference, Eagle3Reference) or reference.hot_token_id is None:
        return ()
    held, wanted = reference.hot_token_id.cpu(), wanted.cpu()
    one, other = held.sort(), wanted.sort()
    if torch.equal(held, wanted) or not torch.equal(one.values, other.values):
        return ()
    if (
        len(held.unique()) != len(held)
        or len(held) != reference.config.draft_vocab_size
    ):
        return ()
    order = one.indices[other.indices.argsort()]
    reference.hot_token_id = held[order]
    head = reference.weights["lm_head.weight"]
    reference.weights["lm_head.weight"] = head[order.to(head.device)]
    return ("the draft ids of the export are in another order than those of training",)
