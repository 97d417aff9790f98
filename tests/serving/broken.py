"""Exports broken by hand, one plausible mistake each: what the engine must notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def _second_norm_at_ones(tensors: Tensors, config: Config) -> None:
    """layers.1.input_layernorm written as it is called in training."""
    norm = tensors["layers.1.hidden_norm.weight"]
    tensors["layers.1.hidden_norm.weight"] = torch.ones_like(norm)


def _norms_swapped(tensors: Tensors, config: Config) -> None:
    one, other = (
        f"layers.0.{name}.weight" for name in ("hidden_norm", "input_layernorm")
    )
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _layer_ids_off_by_one(tensors: Tensors, config: Config) -> None:
    """speculators' own ids, not SGLang's."""
    key = "eagle_aux_hidden_state_layer_ids"
    config["eagle_config"][key] = [k + 1 for k in config["eagle_config"][key]]


def _absolute_d2t(tensors: Tensors, config: Config) -> None:
    """Target ids where SGLang adds offsets.

    Taken modulo the target's vocabulary: an id beyond it would end the engine.
    """
    offsets = tensors["d2t"]
    rows = torch.arange(len(offsets))
    wrong = (rows + (offsets + rows)) % config["vocab_size"]
    tensors["d2t"] = wrong - rows


def _norm_output_missing(tensors: Tensors, config: Config) -> None:
    del config["norm_output"]


def _rope_base_changed(tensors: Tensors, config: Config) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def _fc_columns_permuted(tensors: Tensors, config: Config) -> None:
    """The features of the target's layers in another order."""
    low, middle, high = tensors["fc.weight"].chunk(3, 1)
    tensors["fc.weight"] = torch.cat([high, middle, low], 1).contiguous()


MISTAKES: dict[str, Callable[[Tensors, Config], None]] = {
    "second-norm-at-ones": _second_norm_at_ones,
    "norms-swapped": _norms_swapped,
    "layer-ids-off-by-one": _layer_ids_off_by_one,
    "absolute-d2t": _absolute_d2t,
    "norm-output-missing": _norm_output_missing,
    "rope-base-changed": _rope_base_changed,
    "fc-columns-permuted": _fc_columns_permuted,
}


def break_export(
    export: Path, out: Path, change: Callable[[Tensors, Config], None]
) -> None:
    """Copy an export of one file and change its tensors and config in place."""
    shutil.copytree(export, out)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
