"""The loader of an SGLang release, taken from its wheel and run on a CPU.

``LlamaForCausalLMEagle3`` and the Llama classes under it are executed as they are in
the wheel. What they import from the rest of SGLang is replaced: layers by modules
that hold parameters of the same shapes and note which tensor sets which part, all
else by mocks. So names, shapes and the parameters that exist for a configuration are
SGLang's; no number is computed.
"""

from __future__ import annotations

import builtins
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[2]
_REAL = ("sglang.srt.models.llama", "sglang.srt.models.llama_eagle3")
_PARTS = {
    "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
    "gate_up_proj": {0: "gate_proj", 1: "up_proj"},
}


def cache_folder() -> Path:
    """Where wheels are kept: ``SPEC_EXPORT_WHEELS``, else in the checkout."""
    named = os.environ.get("SPEC_EXPORT_WHEELS")
    return Path(named) if named else REPOSITORY / ".cache" / "sglang-wheels"


def fetch(version: str) -> Path:
    """The wheel of a release; downloaded once, without its dependencies."""
    folder = cache_folder()
    found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--dest", str(folder)),
                f"sglang=={version}",
            ],
            check=True,
            timeout=600,
        )
        found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    return found[-1]


@dataclass
class Loaded:
    """What became of a folder's tensors.

    Attributes:
        landed: Parameter (``layers.0.self_attn.q_proj.weight``) -> the tensors
            that set it, in order; the last one stays.
        dropped: Tensors that no parameter took.
        unset: Parameters that nothing set.
        map_from: The tensor that became the token map, if any.
        refused: Why SGLang raises instead, or an empty string.
        model: The model as SGLang built it.
    """

    landed: dict[str, list[str]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    unset: set[str] = field(default_factory=set)
    map_from: list[str] = field(default_factory=list)
    refused: str = ""
    model: Any = None


class Wheel:
    """One release.

    Attributes:
        version: For example ``0.5.9``.
        files: Names of the files in the wheel.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self._archive = zipfile.ZipFile(fetch(version))
        self.files = set(self._archive.namelist())
        self._modules: dict[str, Any] = {}
        self._log = _Log()

    def load(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Loaded:
        """Build the class for a config.json and give it tensors.

        Args:
            config: Content of config.json; a key that is not there is no attribute.
            tensors: Name -> shape (a tuple), in the order of the files.
        """
        result = Loaded()
        self._log.clear()
        try:
            cls = self._module("sglang.srt.models.llama_eagle3").LlamaForCausalLMEagle3
            result.model = cls(SimpleNamespace(**config))
            result.model.load_weights(self._watched(tensors, result))
        except (ValueError, AttributeError, AssertionError, TypeError) as problem:
            result.refused = f"{type(problem).__name__}: {problem}"
            return result
        names = {id(p): n for n, p in result.model.named_parameters()}
        for name in names.values():
            for part in _parts_of(name):
                result.landed[part] = []
        for parameter, shard, tensor in self._log.entries:
            for part in _parts_of(names[id(parameter)], shard):
                result.landed[part].append(tensor)
        result.unset = {name for name, by in result.landed.items() if not by}
        result.landed = {name: by for name, by in result.landed.items() if by}
        used = {name for by in result.landed.values() for name in by}
        taken = used | set(result.map_from)
        result.dropped = {n for n in tensors if n not in taken}
        return result

    def _watched(
        self, tensors: Mapping[str, Any], result: Loaded
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in order; notes which one is in the loader's hands."""
        for name, shape in tensors.items():
            self._log.current = name
            before = result.model.hot_token_id
            is_map = "d2t" in name
            yield name, torch.zeros(shape, dtype=torch.int64 if is_map else None)
            if result.model.hot_token_id is not before:
                result.map_from.append(name)

    def _module(self, name: str) -> Any:
        """A module of the wheel, executed; its imports are ours."""
        if name not in self._modules:
            path = f"{name.replace('.', '/')}.py"
            code = compile(self._archive.read(path), f"{self.version}/{path}", "exec")
            content: dict[str, Any] = {
                "__name__": name,
                "__builtins__": {**vars(builtins), "__import__": self._import},
            }
            exec(code, content)
            self._modules[name] = SimpleNamespace(**content)
        return self._modules[name]

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if not name.startswith(("sglang", "sgl_kernel", "triton")):
            return __import__(name, globals, locals, fromlist, level)
        if name in _REAL and name not in self._modules:
            return self._module(name)
        if name in self._modules:
            return self._modules[name]
        return _stand_in(self._log)


def _parts_of(name: str, shard: Any = None) -> list[str]:
    """A parameter of the class by the names of the checkpoint, prefix resolved."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for fused, parts in _PARTS.items():
        if f".{fused}." in name:
            chosen = parts if shard is None else {shard: parts[shard]}
            return [name.replace(fused, part) for part in chosen.values()]
    return [name]


class _Log:
    """Who set what: (parameter, shard or None, tensor)."""

    def __init__(self) -> None:
        self.entries: list[tuple[nn.Parameter, Any, str]] = []
        self.current = ""

    def clear(self) -> None:
        self.entries.clear()

    def loader(self, rows: Mapping[Any, int]) -> Any:
        """A loader of a parameter whose shards have so many rows."""

        def load(
            parameter: nn.Parameter, value: torch.Tensor, shard: Any = None
        ) -> None:
            wanted = list(parameter.shape)
            if shard is not None:
                wanted[0] = rows[shard]
            assert list(value.shape) == wanted, (
                f"{self.current}: {list(value.shape)} is not {wanted}"
            )
            self.entries.append((parameter, shard, self.current))

        return load


def _stand_in(log: _Log) -> Any:
    """Stands for any module of SGLang that is not executed."""

    class Weighted(nn.Module):
        def __init__(
            self, shape: tuple[int, ...], bias: bool, rows: Mapping[Any, int]
        ) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
            self.weight.weight_loader = log.loader(rows)  # type: ignore[attr-defined]
            if bias:
                self.bias = nn.Parameter(torch.empty(shape[0]), requires_grad=False)
                self.bias.weight_loader = log.loader(rows)  # type: ignore[attr-defined]

    def qkv(
        hidden: int, dim: int, heads: int, kv: int, bias: bool = True, **_: Any
    ) -> Weighted:
        rows = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
        return Weighted((sum(rows.values()), hidden), bias, rows)

    def merged(hidden: int, sizes: list[int], bias: bool = True, **_: Any) -> Weighted:
        return Weighted((sum(sizes), hidden), bias, dict(enumerate(sizes)))

    def linear(width: int, out: int, bias: bool = True, **_: Any) -> Weighted:
        return Weighted((out, width), bias, {})

    def table(rows: int, width: int, bias: bool = False, **_: Any) -> Weighted:
        return Weighted((rows, width), bias, {})

    def vector(width: int, eps: float = 1e-6, **_: Any) -> Weighted:
        return Weighted((width,), False, {})

    module = MagicMock()
    module.configure_mock(
        QKVParallelLinear=qkv,
        MergedColumnParallelLinear=merged,
        RowParallelLinear=linear,
        ReplicatedLinear=linear,
        ParallelLMHead=table,
        VocabParallelEmbedding=table,
        RMSNorm=vector,
        default_weight_loader=log.loader({}),
        get_tensor_model_parallel_world_size=lambda: 1,
        get_parallel=lambda: MagicMock(tp_size=1, attn_tp_size=1),
        get_spec=lambda: SimpleNamespace(speculative_draft_window_size=None),
        get_global_server_args=lambda: MagicMock(speculative_draft_window_size=None),
        is_npu=lambda: False,
        is_xpu=lambda: False,
        is_cuda=lambda: False,
        add_prefix=lambda name, prefix: f"{prefix}.{name}",
        logging=logging,
    )
    return module
