"""Let SGLang 0.5.23 run DFLASH and DSPARK drafts on a CPU, in fp32.

Five places stand in the way; each is changed right after its module is imported, and
nothing of SGLang is edited. A test harness, no way to serve: the first change makes
two checks believe that the device is CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


class _After(MetaPathFinder):
    """Changes one module right after its import, once."""

    def __init__(self, name: str, change: Change) -> None:
        self.name, self.change = name, change

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find the module as Python would, with the change behind its execution."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, change = spec.loader.exec_module, self.change

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _OnCuda:
    """Resolved server arguments whose device reads ``cuda``."""

    def __init__(self, view: Any) -> None:
        object.__setattr__(self, "_view", view)

    def __getattr__(self, name: str) -> Any:
        return "cuda" if name == "device" else getattr(self._view, name)


def _open_gates(hook: Any) -> None:
    """``_handle_dflash`` and ``_handle_dspark`` raise for a CPU, and do no more."""
    view = hook.resolving_view

    def opened(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(server_args: Any) -> Any:
            hook.resolving_view = lambda args: _OnCuda(view(args))
            try:
                return handle(server_args)
            finally:
                hook.resolving_view = view

        return run

    hook._handle_dflash = opened(hook._handle_dflash)
    hook._handle_dspark = opened(hook._handle_dspark)


def _allow_backend(choices: Any) -> None:
    """A draft backend that is not in this list is replaced by flashinfer."""
    if "intel_amx" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.DRAFT_ATTENTION_BACKEND_CHOICES.append("intel_amx")


def _complete_verify_input(info: Any) -> None:
    """The CPU backend reads the width of a token tree; a block is a chain.

    Both workers also call ``record_stream`` with a CPU stream, which torch refuses.
    """
    import torch

    info.DFlashVerifyInput.tree_topk = 1
    record = torch.Tensor.record_stream

    def record_stream(tensor: torch.Tensor, stream: Any) -> Any:
        return record(tensor, stream) if tensor.is_cuda else None

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]


def _keep_dtype(runner: Any) -> None:
    """``input_embeds`` are rounded to bfloat16 whatever ``--dtype`` says."""
    real = runner.ModelRunner._extend_forward_kwargs

    def kwargs(self: Any, batch: Any, proxies: Any) -> Any:
        out = real(self, batch, proxies)
        if batch.input_embeds is not None and batch.replace_embeds is None:
            out["input_embeds"] = batch.input_embeds.to(self.dtype)
        return out

    runner.ModelRunner._extend_forward_kwargs = kwargs


CHANGES: dict[str, Change] = {
    "sglang.srt.arg_groups.speculative_hook": _open_gates,
    "sglang.srt.arg_groups.choices": _allow_backend,
    "sglang.srt.speculative.dflash_info": _complete_verify_input,
    "sglang.srt.model_executor.model_runner": _keep_dtype,
}


def install() -> None:
    """Wait for the four modules; to be called before SGLang is imported."""
    for name, change in CHANGES.items():
        sys.meta_path.insert(0, _After(name, change))
