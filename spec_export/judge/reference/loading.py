"""SGLang's loading rules for an EAGLE-3 draft, in plain torch.

Names are mapped as ``LlamaForCausalLMEagle3.load_weights`` maps them, by substring;
what fits no parameter is dropped without a word, and what no tensor sets keeps its
initial value: ones in a norm, uninitialised memory in a matrix. Here that memory is
random with a fixed seed, and everything dropped or missing is listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from spec_export.judge.reference.serving_config import ServingConfig, ServingError

Initial = Literal["ones", "random", "zeros"]

STACKED = (
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", "gate"),
    (".gate_up_proj", ".up_proj", "up"),
)
_LEGACY = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the serving class.

    Attributes:
        shape: Of the whole parameter.
        initial: What it holds if no tensor sets it.
        shards: Name and rows of each part of a fused parameter, in order.
        used: Whether the forward reads it.
    """

    shape: tuple[int, ...]
    initial: Initial = "random"
    shards: tuple[tuple[str, int], ...] = ()
    used: bool = True


@dataclass
class LoadReport:
    """What loading did; names of the serving model come without ``model.``.

    Attributes:
        filled: Serving parameter (``...qkv_proj.weight[q]`` for a part) -> tensor of
            the export that set it.
        missing: Serving parameter or part that the forward reads -> what it holds
            instead.
        dropped: Tensors of the export that no parameter took.
        doubled: Parameters that two tensors set (the last one stays).
    """

    filled: dict[str, str] = field(default_factory=dict)
    missing: dict[str, Initial] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)


def weight_files(folder: Path) -> list[Path]:
    """The files SGLang reads: every top-level ``*.safetensors``.

    Where an index exists, files that it does not name are left out (SGLang's
    ``filter_duplicate_safetensors_files``).

    Raises:
        ServingError: there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        files = [f for f in files if f.name in named]
    if not files:
        raise ServingError(f"no *.safetensors in {folder.name}")
    return files


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder, one at a time, in the order SGLang sees them."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, handle.get_tensor(name)


def initial_value(
    shape: tuple[int, ...], initial: Initial, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a parameter holds that no tensor sets."""
    if initial == "ones":
        return torch.ones(shape, dtype=dtype)
    if initial == "zeros":
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)


def part_name(name: str, part: str) -> str:
    """``layers.0.mlp.gate_up_proj.weight`` + ``up`` -> ``...weight[up]``."""
    return f"{name}[{part}]" if part else name


def load_weights(
    folder: Path,
    parameters: Mapping[str, Parameter],
    config: ServingConfig,
    held: torch.dtype,
    compute: torch.dtype,
    borrowed: Collection[str] = (),
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, LoadReport]:
    """Load an export as SGLang does.

    Args:
        folder: The export.
        parameters: The class's parameters by full name (``model.layers.0...``).
        config: The resolved configuration (release rules for names).
        held: The parameters' dtype: tensors are cast to it as ``copy_`` does.
        compute: Dtype of the values returned, for the comparison.
        borrowed: Parameters (without ``model.``) that the target replaces; they are
            not loaded.

    Returns:
        Values by name without ``model.`` and, for fused parameters, by part; the
        hot token ids [draft vocab] or None; the report.

    Raises:
        ServingError: a shape does not fit.
    """
    values: dict[str, torch.Tensor] = {}
    report = LoadReport()
    hot: torch.Tensor | None = None

    def put(name: str, part: str, tensor: torch.Tensor, source: str) -> None:
        shape = parameters[name].shape
        if part:
            shape = (dict(parameters[name].shards)[part], *shape[1:])
        key = part_name(name.removeprefix("model."), part)
        if tuple(tensor.shape) != shape:
            raise ServingError(
                f"{source} has shape {list(tensor.shape)}, {key} has {list(shape)}"
            )
        if key in report.filled:
            report.doubled.append(key)
        report.filled[key] = source
        if key not in borrowed:
            values[key] = tensor.to(held).to(compute)

    for source, tensor in read_tensors(folder):
        name = source
        if not config.has("layer_names") and "layers." in name:
            report.dropped.append(source)  # the only layer is called midlayer
            continue
        for legacy, new in _LEGACY.items():
            name = name.replace(legacy, new)
        if "d2t" in name:
            if tensor.is_floating_point():
                raise ServingError(f"{source} holds {tensor.dtype}, which is no index")
            hot = tensor + torch.arange(tensor.shape[0])
            report.filled["d2t"] = source
            continue
        if "t2d" in name:
            continue
        part = ""
        for fused, single, shard in STACKED:
            if single in name:
                name, part = name.replace(single, fused), shard
                break
        full = name if name in parameters else f"model.{name}"
        if full not in parameters:
            report.dropped.append(source)
            continue
        shards = parameters[full].shards
        if shards and not part:
            sizes = [size for _, size in shards]
            if tensor.shape[0] != sum(sizes):
                raise ServingError(
                    f"{source} has {tensor.shape[0]} rows, {name} has {sum(sizes)}"
                )
            for (shard, _), piece in zip(shards, tensor.split(sizes), strict=True):
                put(full, shard, piece, source)
        else:
            put(full, part, tensor, source)

    for seed, (full, parameter) in enumerate(parameters.items()):
        name = full.removeprefix("model.")
        parts = parameter.shards or (("", parameter.shape[0]),)
        for offset, (part, rows) in enumerate(parts):
            key = part_name(name, part)
            if key not in report.filled and key not in borrowed:
                shape = (rows, *parameter.shape[1:])
                values[key] = initial_value(
                    shape, parameter.initial, 1000 * seed + offset, compute
                )
                if parameter.used:
                    report.missing[key] = parameter.initial
    return values, hot, report
