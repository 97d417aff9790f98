"""A folder of safetensors files as one set of named tensors, read by mmap.

numpy is imported where values are read: names, shapes and the index do without it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from spec_export.artifact.disk import read_regular
from spec_export.artifact.header import Header, Span, read_header
from spec_export.findings import (
    Finding,
    SpecExportError,
    error,
    info,
    usage_error,
    warning,
)
from spec_export.layout.tensors import TensorInfo

if TYPE_CHECKING:
    import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")


class WeightFiles:
    """Tensors by name, whatever file of a folder they are in.

    Attributes:
        folder: Where the files are.
        tensors: All of them, sorted by name.
        files: For each tensor the name of its file.
        headers: For each file its header.
        findings: What is worth knowing but no error.
    """

    def __init__(self, folder: Path, headers: dict[str, Header]) -> None:
        self.folder = folder
        self.headers = headers
        self.findings: list[Finding] = []
        self.files: dict[str, str] = {}
        self._spans: dict[str, Span] = {}
        self._maps: dict[str, np.ndarray] = {}
        self._stats = {name: _stat(folder / name) for name in headers}

    @classmethod
    def open(cls, folder: str | Path, *, every_file: bool = False) -> WeightFiles:
        """Open what a folder holds, from the headers alone.

        Args:
            folder: Has ``model.safetensors``, or an index and its shards.
            every_file: Take every ``*.safetensors`` in the folder instead, as
                SGLang's loader does.

        Raises:
            SpecExportError: exit 2 ``path-missing`` without safetensors weights;
                exit 1 for files that are missing, corrupt or contradict each
                other (``file-missing``, ``file-corrupt``, ``file-contradiction``,
                ``path-escape``).
        """
        folder = Path(folder)
        present = sorted(p.name for p in folder.glob("*.safetensors"))
        weight_map = {} if every_file else read_index(folder)
        named = sorted(set(weight_map.values()))
        if not named:
            named = [n for n in present if every_file or n == SINGLE]
        if not named:
            raise _no_weights(folder, present)
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise SpecExportError(
                [
                    error("file-missing", name, f"{INDEX} names it, it is not there")
                    for name in missing
                ]
            )
        self = cls(folder, {name: read_header(folder / name) for name in named})
        self._take(named, weight_map)
        strays = [] if every_file else [n for n in present if n not in named]
        self._compare_strays(strays)
        return self

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Name, dtype and shape of each tensor, sorted by name."""
        return {name: self._spans[name].info for name in sorted(self._spans)}

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor as a read-only uint8 view of the mapped file."""
        return self._bytes(self.files[name], self._spans[name])

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the mapped file, in its own dtype.

        Raises:
            SpecExportError: ``dtype-unsupported`` for a format numpy has not.
        """
        from spec_export.artifact.dtypes import numpy_dtype

        tensor = self._spans[name].info
        dtype = numpy_dtype(tensor.dtype)
        return self.raw(name).view(dtype).reshape(tensor.shape)

    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors of this folder agree in dtype, shape and bytes."""
        a, b = self._spans[first], self._spans[second]
        return _same_kind(a, b) and _equal(
            self._bytes(self.files[first], a), self._bytes(self.files[second], b)
        )

    def check_unchanged(self) -> list[Finding]:
        """Errors for files that were replaced or written to since they were opened."""
        return [
            error("file-changed", name, "it changed while it was being read")
            for name, before in self._stats.items()
            if _stat(self.folder / name) != before
        ]

    def _bytes(self, file: str, span: Span) -> np.ndarray:
        from spec_export.artifact.blocks import map_file

        if file not in self._maps:
            self._maps[file] = map_file(str(self.folder / file))
        return self._maps[file][span.start : span.end]

    def _take(self, named: list[str], weight_map: dict[str, str]) -> None:
        """Decide which file each tensor comes from; refuse contradictions."""
        problems = []
        for tensor, file in weight_map.items():
            if tensor not in self.headers[file].tensors:
                problems.append(
                    error(
                        "file-contradiction",
                        tensor,
                        f"{INDEX} says that it is in {file}, which lacks it",
                    )
                )
        for file in named:
            for tensor, span in self.headers[file].tensors.items():
                if weight_map and tensor not in weight_map:
                    problems.append(
                        error(
                            "file-contradiction",
                            tensor,
                            f"{file} holds it, and {INDEX} does not list it",
                        )
                    )
                elif weight_map.get(tensor, file) != file:
                    problems += self._twice(tensor, weight_map[tensor], file, span)
                elif tensor in self.files:
                    problems += self._twice(tensor, self.files[tensor], file, span)
                else:
                    self.files[tensor], self._spans[tensor] = file, span
        if problems:
            raise SpecExportError(problems)

    def _twice(self, tensor: str, first: str, second: str, span: Span) -> list[Finding]:
        """An error if two files hold different values under one name."""
        other = self.headers[first].tensors.get(tensor)
        if other is None or (
            _same_kind(span, other)
            and _equal(self._bytes(first, other), self._bytes(second, span))
        ):
            return []
        return [
            error(
                "file-contradiction",
                tensor,
                f"{first} and {second} hold different values of it",
                "remove the file that is left over",
            )
        ]

    def _compare_strays(self, strays: list[str]) -> None:
        """Weight files that nobody names: other values for one name are an error."""
        problems = []
        for file in strays:
            try:
                header = read_header(self.folder / file)
            except SpecExportError as unreadable:
                self.findings.append(
                    warning("export-ignored", file, unreadable.findings[0].message)
                )
                continue
            self.headers[file] = header
            found: list[Finding] = []
            for tensor, span in header.tensors.items():
                if tensor in self.files:
                    found += self._twice(tensor, self.files[tensor], file, span)
            problems += found
            del self.headers[file]
            self._maps.pop(file, None)
            self.findings.append(
                info("export-ignored", file, "no index names it, it was not read")
            )
        if problems:
            raise SpecExportError(problems)


def read_index(folder: Path) -> dict[str, str]:
    """The ``weight_map`` of a folder's index, ``{}`` if it has no index.

    Raises:
        SpecExportError: exit 1, ``file-corrupt`` or ``path-escape``.
    """
    path = folder / INDEX
    if not path.is_file():
        return {}
    weight_map = read_json(path).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise SpecExportError(
            [error("file-corrupt", INDEX, f"{path} has no weight_map of file names")]
        )
    escaping = sorted({f for f in weight_map.values() if not stays_inside(f)})
    if escaping:
        raise SpecExportError(
            [
                error("path-escape", INDEX, f"it names {file!r}, outside the folder")
                for file in escaping[:1]
            ]
        )
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        SpecExportError: exit 1 ``file-corrupt``; exit 2 ``path-missing``.
    """
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        raise usage_error("path-missing", path.name, f"{path} is not there") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise SpecExportError(
            [error("file-corrupt", path.name, f"{path} is no JSON file: {problem}")]
        ) from problem
    if not isinstance(content, dict):
        raise SpecExportError(
            [error("file-corrupt", path.name, f"{path} holds no JSON object")]
        )
    return content


def stays_inside(name: str) -> bool:
    """Whether a file name of an index or manifest cannot leave its folder."""
    path = PurePosixPath(name)
    return (
        name not in ("", ".")
        and "\0" not in name
        and "\\" not in name
        and not path.is_absolute()
        and ".." not in path.parts
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of any format, or an index of some."""
    return any(
        p.name.endswith((".safetensors", ".safetensors.index.json"))
        or (p.suffix in OTHER_FORMATS and p.name.startswith(("model", "pytorch_model")))
        for p in folder.iterdir()
    )


def _no_weights(folder: Path, present: list[str]) -> SpecExportError:
    other = sorted(p.name for p in folder.iterdir() if p.suffix in OTHER_FORMATS)
    weights = [n for n in other if n.startswith(("model", "pytorch_model"))]
    if weights:
        return usage_error(
            "path-missing",
            weights[0],
            f"{folder} holds its weights as {weights[0]}, only safetensors are read",
            "save it again with speculators 0.7 or newer, which writes safetensors",
        )
    held = f"; it holds {', '.join(present)}" if present else ""
    return usage_error(
        "path-missing",
        folder.name,
        f"{folder} holds neither {SINGLE} nor {INDEX}{held}",
    )


def _same_kind(a: Span, b: Span) -> bool:
    return (a.info.dtype, a.info.shape) == (b.info.dtype, b.info.shape)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    import numpy as np

    from spec_export.artifact.blocks import iter_blocks

    return all(
        np.array_equal(x, y)
        for x, y in zip(iter_blocks(a), iter_blocks(b), strict=True)
    )


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
