"""A draft of any size and its target, written without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spec_export.artifact.disk import write_file
from spec_export.artifact.manifest import Manifest, weights_metadata
from spec_export.artifact.writer import Entry, write_safetensors, write_weights
from spec_export.layout.tensors import ITEM_SIZE
from tests.helpers.field import draft_config, target_config

# name: hidden, inner, heads, kv heads, vocabulary, draft vocabulary
SIZES = {
    "0.1B": (1536, 4608, 12, 4, 32_768, 8_192),
    "0.3B": (2304, 6912, 18, 6, 65_536, 16_384),
    "1.1B": (4096, 14336, 32, 8, 128_256, 32_000),
}


class Shapes:
    """The sizes of a draft and all tensors of its checkpoint."""

    def __init__(self, size: str) -> None:
        self.name = size
        (self.hidden, self.inner, self.heads, self.kv, self.vocab, self.draft) = SIZES[
            size
        ]
        self.dim = self.hidden // self.heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        h, kv = self.hidden, self.kv * self.dim
        return {
            "embed_tokens.weight": (self.vocab, h),
            "lm_head.weight": (self.draft, h),
            "fc.weight": (h, 3 * h),
            "norm.weight": (h,),
            "layers.0.input_layernorm.weight": (h,),
            "layers.0.hidden_norm.weight": (h,),
            "layers.0.post_attention_layernorm.weight": (h,),
            "layers.0.mlp.gate_proj.weight": (self.inner, h),
            "layers.0.mlp.up_proj.weight": (self.inner, h),
            "layers.0.mlp.down_proj.weight": (h, self.inner),
            "layers.0.self_attn.q_proj.weight": (h, 2 * h),
            "layers.0.self_attn.k_proj.weight": (kv, 2 * h),
            "layers.0.self_attn.v_proj.weight": (kv, 2 * h),
            "layers.0.self_attn.o_proj.weight": (h, h),
        }

    def config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "head_dim": self.dim,
            "max_position_embeddings": 2048,
        }

    def ids(self) -> np.ndarray:
        """The target's id of each draft id, ascending."""
        return np.arange(self.draft, dtype=np.int64) * (self.vocab // self.draft)


def _write(path: Path, tensors: dict[str, Any]) -> None:
    kinds = {"bfloat16": "BF16", "int64": "I64", "bool": "BOOL"}
    entries = []
    for name, make in tensors.items():
        array = make()
        dtype = kinds[array.dtype.name]
        assert array.dtype.itemsize == ITEM_SIZE[dtype]
        entries.append(Entry(name, dtype, array.shape, make))
        del array
    write_safetensors(path, entries, {"format": "pt"})


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values like 0.02 * normal, fast: random mantissas below a fixed exponent."""
    generator = np.random.default_rng(len(name) * 7919 + sum(name.encode()))
    bits = generator.integers(0, 1 << 16, int(np.prod(shape)), dtype=np.uint16)
    bits = (bits & 0x80FF) | 0x3C00
    return bits.view(ml_dtypes.bfloat16).reshape(shape)


def make_files(root: Path, size: str) -> tuple[Path, Path]:
    """A checkpoint and its target.

    Returns:
        Their folders.
    """
    shapes = Shapes(size)
    target, source = root / "target", root / "source"
    if source.is_dir():
        return source, target
    for folder in (target, source):
        folder.mkdir(parents=True)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    whole = (shapes.vocab, shapes.hidden)
    ids = shapes.ids()
    norm = np.ones(shapes.hidden, dtype=ml_dtypes.bfloat16)
    tensors: dict[str, Any] = {
        embed: lambda: _random(embed, whole),
        head: lambda: _random(head, whole),
        "model.norm.weight": lambda: norm,
    }
    config = target_config(**shapes.config())
    (target / "config.json").write_text(json.dumps(config))
    _write(target / "model.safetensors", tensors)

    tensors = {
        name: lambda name=name, shape=shape: _random(name, shape)
        for name, shape in shapes.tensors().items()
    }
    tensors["embed_tokens.weight"] = lambda: _random(embed, whole)
    tensors["lm_head.weight"] = lambda: _random(head, whole)[ids]
    mask = np.zeros(shapes.vocab, dtype=np.bool_)
    mask[ids] = True
    tensors["d2t"] = lambda: ids - np.arange(shapes.draft)
    tensors["t2d"] = lambda: mask
    config = draft_config(target, draft_vocab_size=shapes.draft, layer=shapes.config())
    (source / "config.json").write_text(json.dumps(config))
    _write(source / "model.safetensors", tensors)
    return source, target


def make_export(folder: Path, size: int, max_shard_size: int | None = None) -> int:
    """An export for those who read its bytes alone: its tensors are no draft's.

    Args:
        folder: Is made.
        size: Bytes of its weights, within one tensor.
        max_shard_size: As of ``write_weights``.

    Returns:
        Bytes of its files, the manifest left out.
    """
    shape = (15_625, 8_000)  # 250 MB
    piece = _random("piece", (125, 8_000))

    def blocks() -> Iterator[np.ndarray]:
        for _ in range(shape[0] // len(piece)):
            yield piece

    names = [f"{i}.weight" for i in range(round(size / 2 / np.prod(shape)))]
    entries = [Entry(name, "BF16", shape, blocks) for name in names]
    about = {"role": None, "source": [], "dtype": "BF16", "shape": list(shape)}
    content: dict[str, Any] = {
        "run_id": "bench",
        "status": "saved",
        "serving": {
            "min_version": "0.5.23",
            "max_known_version": "0.5.23",
            "algorithm": "EAGLE3",
            "architecture": "LlamaForCausalLMEagle3",
            "requires_plugin": False,
            "launch": [],
        },
        # Nobody compares the digests of single tensors with the files.
        "tensors": {name: {**about, "sha256": "0" * 64} for name in names},
    }
    folder.mkdir()
    metadata = weights_metadata(Manifest.model_validate(content))
    files = write_weights(folder, entries, metadata, max_shard_size).files
    files["config.json"] = write_file(folder / "config.json", b"{}")
    content["files"] = {name: fact._asdict() for name, fact in files.items()}
    Manifest.model_validate(content).write(folder)
    return sum(fact.size for fact in files.values())
