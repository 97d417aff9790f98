"""The target: its configuration and the three tensors that a draft shares with it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spec_export.artifact.blocks import (
    BLOCK_BYTES,
    as_bytes,
    iter_blocks,
    map_file,
    mapping_of,
    release,
)
from spec_export.artifact.dtypes import numpy_dtype
from spec_export.artifact.header import Span, read_header
from spec_export.artifact.weights import INDEX, SINGLE, read_index, read_json
from spec_export.findings import (
    Finding,
    SpecExportError,
    error,
    usage_error,
    warning,
)
from spec_export.layout.targets import language_model
from spec_export.layout.tensors import TensorInfo

Role = Literal["embedding", "head", "norm"]
ROLES: tuple[Role, ...] = ("embedding", "head", "norm")

# How speculators 0.9.0 finds them (utils/loading.py): each name exactly, then the
# shortest one that ends in it, then the next name.
_NAMES: dict[Role, tuple[str, ...]] = {
    "embedding": (
        "embed_tokens.weight",
        "tok_embeddings.weight",
        "llm.embed.weight",
        "backbone.embeddings.weight",
    ),
    "head": ("lm_head.weight", "output.weight", "llm.unembed.weight"),
    "norm": (
        "model.norm.weight",
        "llm.norm.weight",
        "backbone.norm_f.weight",
        "norm.weight",
    ),
}
# What stands beside, or instead of, a quantised ``<stem>.weight``.
_PACKED_LEAVES = (
    "qweight",
    "qzeros",
    "scales",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight.absmax",
    "weight.quant_map",
)
_PACKED_BODIES = ("qweight", "weight_packed")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)


class Target:
    """A target model on this machine; nothing is loaded before it is read.

    Attributes:
        path: Its folder.
        name: Hub id where one is known, else the folder's name; no path.
        revision: The hub's commit, if the folder is a hub snapshot.
        config: Its config.json, with ModelOpt's settings where they are beside it.
        has_weights: Whether safetensors weights are at hand.
        tensors: The tensors that hold the roles, by their own names.
        findings: What is wrong with files that are not needed.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.config = _with_modelopt(read_json(path / "config.json"), path)
        snapshot = path.parent.name == "snapshots"
        self.revision = path.name if snapshot else None
        self.name = name or (_cached_id(path) if snapshot else None) or path.name
        self.findings: list[Finding] = []
        self._files = _file_of_each(path)
        self.has_weights = bool(self._files)
        self._names = {role: self._resolve(role) for role in ROLES}
        self._spans: dict[str, Span] = {}
        self._digests: dict[str, str] = {}
        self._open_roles()

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors that hold the roles, by their own names."""
        return {name: span.info for name, span in self._spans.items()}

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The configuration of the language model inside a multimodal one."""
        return language_model(self.config)

    @property
    def architectures(self) -> list[str]:
        """Class names of the whole model."""
        found = self.config.get("architectures")
        names = found if isinstance(found, list) else []
        return [name for name in names if isinstance(name, str)]

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states."""
        return self._number("hidden_size")

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids."""
        return self._number("vocab_size")

    @property
    def num_hidden_layers(self) -> int | None:
        """Number of decoder layers."""
        return self._number("num_hidden_layers")

    @property
    def head_is_tied(self) -> bool:
        """Whether the embedding serves as head: no head tensor of any kind exists.

        Without weights the configuration's flag decides.
        """
        if self.has_weights:
            return self._names["head"] is None
        tie = self.config.get("tie_word_embeddings")
        if tie is None:
            tie = self.text_config.get("tie_word_embeddings")
        return bool(tie)

    def find(self, role: Role) -> TensorInfo | None:
        """The tensor that holds a role; for a tied head the embedding's."""
        name = self._name(role)
        return self._spans[name].info if name is not None else None

    def packed(self, role: Role) -> str | None:
        """Why a role's tensor is no plain float matrix; None if it is one."""
        tensor = self.find(role)
        if tensor is None:
            return None
        if not tensor.is_float:
            return f"{tensor.name} is stored as {tensor.dtype} {list(tensor.shape)}"
        beside = _packed_siblings(tensor.name, self._files)
        return f"{beside[0]} stands beside {tensor.name}" if beside else None

    def read(
        self, role: Role, rows: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """The values of a role's tensor, as they are saved.

        Args:
            role: Which tensor.
            rows: Row ids to pick, in this order; None for the whole tensor, which
                is a read-only view of the mapped file.

        Raises:
            SpecExportError: exit 1 without this tensor (``target-needed``), for a
                packed one (``head-packed``), or a row that does not exist
                (``shape-mismatch``).
        """
        matrix = self._matrix(role)
        if rows is None:
            return matrix
        ids = self._checked(role, matrix, rows)
        picked = np.empty((len(ids), *matrix.shape[1:]), dtype=matrix.dtype)
        flat, position = picked.reshape(-1), 0
        for block in self.iter_rows(role, ids):
            flat[position : position + block.size] = block
            position += block.size
        return picked

    def iter_rows(
        self,
        role: Role,
        rows: Sequence[int] | np.ndarray | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[np.ndarray]:
        """What ``read`` gives, as flat blocks, without holding all of it.

        Raises:
            SpecExportError: as ``read``.
        """
        matrix = self._matrix(role)
        if rows is None:
            yield from iter_blocks(matrix, block_bytes)
            return
        ids = self._checked(role, matrix, rows)
        row_bytes = matrix[:1].nbytes or 1
        step = max(1, block_bytes // row_bytes)
        mapping = mapping_of(matrix)
        for start in range(0, len(ids), step):
            yield matrix[ids[start : start + step]].reshape(-1)
            if mapping is not None:
                release(mapping)

    def digest(self, role: Role) -> str | None:
        """SHA-256 of the raw bytes of a role's tensor; None where there is none.

        A tied head has the embedding's digest.
        """
        name = self._name(role)
        if name is None:
            return None
        if name not in self._digests:
            digest = hashlib.sha256()
            for block in iter_blocks(self._raw(name)):
                digest.update(as_bytes(block))
            self._digests[name] = digest.hexdigest()
        return self._digests[name]

    def _number(self, key: str) -> int | None:
        value = self.text_config.get(key)
        return value if isinstance(value, int) and value > 0 else None

    def _name(self, role: Role) -> str | None:
        name = self._names[role]
        if name is None and role == "head":
            return self._names["embedding"]
        return name

    def _resolve(self, role: Role) -> str | None:
        found = resolve_name(role, self._files)
        if found is not None:
            return found
        # A packed matrix has no ".weight" of its own; it is not a tied head.
        stems = tuple(name.removesuffix(".weight") for name in _NAMES[role])
        packed = sorted(
            name
            for name in self._files
            for stem in stems
            for leaf in _PACKED_BODIES
            if name == f"{stem}.{leaf}" or name.endswith(f".{stem}.{leaf}")
        )
        return min(packed, key=len) if packed else None

    def _open_roles(self) -> None:
        """Read the headers of the files that hold a role, and of no others."""
        needed = {name for name in self._names.values() if name is not None}
        missing = []
        for file in sorted(set(self._files.values())):
            here = [name for name in sorted(needed) if self._files[name] == file]
            if not here:
                if not (self.path / file).is_file():
                    self.findings.append(
                        warning("file-missing", file, f"{self.name} lacks this shard")
                    )
                continue
            spans = read_header(self.path / file).tensors
            for name in here:
                if name in spans:
                    self._spans[name] = spans[name]
                else:
                    missing.append(
                        error(
                            "file-contradiction",
                            name,
                            f"{INDEX} of the target {self.name} says that it is in "
                            f"{file}, which lacks it",
                        )
                    )
        if missing:
            raise SpecExportError(missing)

    def _raw(self, name: str) -> np.ndarray:
        span = self._spans[name]
        return map_file(str(self.path / self._files[name]))[span.start : span.end]

    def _matrix(self, role: Role) -> np.ndarray:
        name = self._name(role)
        if name is None:
            raise SpecExportError(
                [
                    error(
                        "target-needed",
                        role,
                        f"the target {self.name} has no {role} at hand",
                        "give a folder with its weights: --target DIR",
                    )
                ]
            )
        if (reason := self.packed(role)) is not None:
            raise SpecExportError(
                [
                    error(
                        "head-packed",
                        name,
                        f"the {role} of the target {self.name} is packed: {reason}",
                        "give the target before it was quantised: --target DIR",
                    )
                ]
            )
        tensor = self._spans[name].info
        return self._raw(name).view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def _checked(
        self, role: Role, matrix: np.ndarray, rows: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        ids = np.asarray(rows, dtype=np.int64)
        wrong = ids[(ids < 0) | (ids >= len(matrix))]
        if wrong.size:
            raise SpecExportError(
                [
                    error(
                        "shape-mismatch",
                        role,
                        f"row {int(wrong[0])} is asked for, the target's {role} has "
                        f"{len(matrix)} rows",
                    )
                ]
            )
        return ids


def resolve_name(role: Role, names: dict[str, str]) -> str | None:
    """The tensor that speculators takes for a role, by its own matching rule.

    Args:
        role: What is looked for.
        names: Tensor names of the target, in the order of its index.
    """
    for candidate in _NAMES[role]:
        if candidate in names:
            return candidate
        matches = [name for name in names if name.endswith(candidate)]
        if matches:
            return min(matches, key=len)
    return None


def open_target(path: str | Path) -> Target:
    """Open a target: a folder, or a hub id whose files are in the local cache.

    The network is never asked.

    Raises:
        SpecExportError: exit 2 ``path-missing``; exit 1 for corrupt files.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise usage_error(
                "path-missing",
                folder.name,
                f"{folder} holds no config.json, so it is no target",
                "give the folder of the target model: --target DIR",
            )
        return Target(folder.resolve())
    cached = from_hub_cache(str(path))
    if cached is None:
        raise usage_error(
            "path-missing",
            folder.name,
            f"{path} is no folder, and no model of this name is in the local hub cache",
            "download the target first, or give its folder: --target DIR",
        )
    return Target(cached, str(path))


def _file_of_each(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index or the one file; ``{}`` without."""
    weight_map = read_index(folder)
    if weight_map:
        return weight_map
    if (folder / SINGLE).is_file():
        return dict.fromkeys(read_header(folder / SINGLE).tensors, SINGLE)
    return {}


def _with_modelopt(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A configuration as SGLang completes it (configs/model_config.py).

    ModelOpt may leave its settings in a file of their own, which SGLang reads where
    config.json has none; ``quant_algo: null`` says that nothing is quantised.
    """
    path = folder / "hf_quant_config.json"
    parts = (config, language_model(config))
    if any(part.get("quantization_config") is not None for part in parts):
        return config
    if not path.is_file():
        return config
    found = read_json(path)
    settings = found.get("quantization", found)
    if not isinstance(settings, dict) or not settings.get("quant_algo"):
        return config
    return {**config, "quantization_config": settings}


def _packed_siblings(name: str, names: dict[str, str]) -> list[str]:
    stem = name.removesuffix("weight").removesuffix(".")
    return [f"{stem}.{leaf}" for leaf in _PACKED_LEAVES if f"{stem}.{leaf}" in names]


def from_hub_cache(name: str) -> Path | None:
    """The snapshot folder of a hub id, if its config.json was downloaded."""
    if not _HUB_ID.fullmatch(name) or ".." in name:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that the hub allows
        return None
    return Path(found).parent if isinstance(found, str) else None


def _cached_id(snapshot: Path) -> str | None:
    """``org/name`` of a folder ``models--org--name/snapshots/<commit>``."""
    folder = snapshot.parent.parent.name
    if not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/")
