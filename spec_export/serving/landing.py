"""What SGLang made of a draft's tensors, held against the manifest.

SGLang's loaders drop names that they do not know and leave parameters that no tensor
sets, both without a word. Which tensor sets which parameter is not worked out again
here: while a model loads, each parameter's own loader is watched. Afterwards the
parameter's loader is run a second time, into a buffer that holds a pattern. Where the
parameter has other bits than the buffer, it was not set, or it is not the tensor after
the cast. That holds for fused, padded and sharded parameters alike.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader

from spec_export.artifact.blocks import as_bytes
from spec_export.artifact.manifest import Manifest, TensorEntry
from spec_export.findings import Finding, SpecExportError, error
from spec_export.serving.strict import DraftRefused

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Parameters that a class of SGLang builds and never uses.
_UNUSED = {
    "LlamaForCausalLMEagle3": re.compile(
        r"model\.layers\.[1-9]\d*\.input_layernorm\.weight"
    ),
}
# DSpark builds it only where SGLANG_RAGGED_VERIFY_MODE asks for it.
_OPTIONAL = "confidence_head"
_PATTERN = 0xA5  # repeated, a float that no uninitialised memory holds all over
_AGAIN = "copy the export again"


@dataclass(frozen=True)
class _Call:
    """One call of a parameter's loader."""

    tensor: str
    value: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Watch:
    """What happens while a model loads.

    Attributes:
        seen: The tensors that were offered, by name.
        names: For each of them, by identity, its name: some models collect all
            tensors before they load the first one.
        calls: For each parameter the calls of its loader, in order.
        loaders: For each parameter its loader.
        current: Name of the tensor that was offered last.
    """

    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    loaders: dict[str, Callable[..., Any]] = field(default_factory=dict)
    current: str = ""

    def feed(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand the tensors on and take their names down."""
        for name, tensor in weights:
            self.current = self.names[id(tensor)] = name
            self.seen[name] = tensor
            yield name, tensor

    @contextmanager
    def watching(self, parameters: dict[str, Any]) -> Iterator[None]:
        """Put a recorder before every parameter's loader for a while."""
        before: dict[str, tuple[str, Any]] = {}
        for name, parameter in parameters.items():
            # A property without a setter in the parameters of quantised layers.
            key = "weight_loader"
            if hasattr(parameter, "_weight_loader"):
                key = "_weight_loader"
            own = getattr(parameter, key, None)
            before[name] = key, own
            self.loaders[name] = own or default_weight_loader
            setattr(parameter, key, self._recorder(name))
        try:
            yield
        finally:
            for name, (key, own) in before.items():
                if own is None:
                    delattr(parameters[name], key)
                else:
                    setattr(parameters[name], key, own)

    def _recorder(self, name: str) -> Callable[..., Any]:
        def load(parameter: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.current = self.names.get(id(value), self.current)
            call = _Call(self.current, value, args, kwargs)
            self.calls.setdefault(name, []).append(call)
            return self.loaders[name](parameter, value, *args, **kwargs)

        return load


def load_and_compare(
    model: Any,
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    hashed: bool,
) -> tuple[Any, list[Finding]]:
    """Load a model and compare its parameters with the folder's manifest.

    Of the parameters one at a time is held a second time, in host memory.

    Args:
        model: Built, not yet loaded.
        load: Its ``load_weights``.
        weights: What SGLang's loader read.
        folder: The export.
        hashed: Whether to hash the tensors; the launcher may have hashed the files.

    Returns:
        What ``load`` returned, and error findings.

    Raises:
        DraftRefused: no readable manifest, or ``load`` fails.
    """
    try:
        manifest = Manifest.read(folder)
    except SpecExportError as problem:
        raise DraftRefused(folder, problem.findings) from problem
    watch, parameters = _Watch(), dict(model.named_parameters())
    try:
        with watch.watching(parameters):
            result = load(watch.feed(weights))
    except Exception as problem:
        why = f"SGLang cannot load it: {type(problem).__name__} {problem}".rstrip()
        finding = error("shape-mismatch", watch.current, why, _AGAIN)
        raise DraftRefused(folder, [finding]) from problem
    findings = _tensors(watch, manifest, hashed)
    findings += _dropped(watch, model)
    findings += _token_map(watch, model)
    findings += _parameters(watch, manifest, type(model).__name__, parameters)
    return result, findings


def _tensors(watch: _Watch, manifest: Manifest, hashed: bool) -> list[Finding]:
    """Whether the tensors that SGLang read are the manifest's."""
    findings = []
    for name in sorted(watch.seen.keys() | manifest.tensors.keys()):
        entry, found = manifest.tensors.get(name), watch.seen.get(name)
        if found is None:
            why = "the manifest has it, SGLang did not read it"
            findings.append(error("tensor-missing", name, why, _AGAIN))
        elif entry is None:
            why = "SGLang read it, the manifest does not have it"
            findings.append(error("tensor-unexpected", name, why, _AGAIN))
        elif not _is(found, entry, hashed):
            why = "SGLang read other values than the manifest describes"
            findings.append(error("file-changed", name, why, _AGAIN))
    return findings


def _is(tensor: torch.Tensor, entry: TensorEntry, hashed: bool) -> bool:
    if tensor.dtype != _TORCH.get(entry.dtype) or list(tensor.shape) != entry.shape:
        return False
    if not hashed:
        return True
    digest = hashlib.sha256(as_bytes(_bits(tensor).numpy()))
    return digest.hexdigest() == entry.sha256


def _dropped(watch: _Watch, model: Any) -> list[Finding]:
    """Tensors that no parameter took."""
    taken = {call.tensor for calls in watch.calls.values() for call in calls}
    why = f"{type(model).__name__} has no parameter for it and dropped it"
    return [
        error("name-dropped", name, why, "export the draft again")
        for name in watch.seen
        if name not in taken
        and "d2t" not in name
        and (not name.startswith(_OPTIONAL) or getattr(model, _OPTIONAL, None))
    ]


def _token_map(watch: _Watch, model: Any) -> list[Finding]:
    """Whether draft ids become target ids as the token map says."""
    ids = getattr(model, "hot_token_id", None)
    offsets = [(n, tensor) for n, tensor in watch.seen.items() if "d2t" in n]
    for name, tensor in offsets:
        wanted = tensor + torch.arange(len(tensor), device=tensor.device)
        if ids is None or not torch.equal(ids.cpu(), wanted.cpu()):
            why = "it did not become the target ids of the draft's ids"
            return [error("name-dropped", name, why, "export the draft again")]
    size = getattr(model.config, "draft_vocab_size", None)
    vocab = getattr(model.config, "vocab_size", None)
    if not offsets and hasattr(model, "hot_token_id") and size not in (None, vocab):
        why = f"no tensor maps the draft's {size} ids to the target's {vocab}"
        return [error("parameter-without-origin", "d2t", why, "export the draft again")]
    return []


def _parameters(
    watch: _Watch, manifest: Manifest, class_name: str, parameters: dict[str, Any]
) -> list[Finding]:
    """Whether every parameter holds what its origin says."""
    from_target = {
        entry.name.removeprefix("model.") for entry in manifest.provided_by_target
    }
    unused = _UNUSED.get(class_name)
    findings = []
    for name, parameter in parameters.items():
        calls = watch.calls.get(name)
        if calls:
            findings += _landed(name, parameter, calls, watch.loaders[name])
        elif not (
            name.removeprefix("model.") in from_target
            or (unused is not None and unused.fullmatch(name))
        ):
            why = f"no tensor sets this parameter of {class_name}"
            hint = "export the draft again for this server's release"
            findings.append(error("parameter-without-origin", name, why, hint))
    return findings


def _landed(
    name: str, parameter: Any, calls: list[_Call], loader: Callable[..., Any]
) -> list[Finding]:
    """Whether a parameter is its tensors, whole and bit by bit, after the cast."""
    parts = [(call.args, tuple(call.kwargs.items())) for call in calls]
    names = ", ".join(call.tensor for call in calls)
    if any(part in parts[:i] for i, part in enumerate(parts)):
        why = f"{names} set the same part of it; the last one wins"
        return [error("file-contradiction", name, why, "export the draft again")]
    found = _bits(parameter.data)
    wanted = _replay(parameter, calls, loader, _PATTERN)
    if torch.equal(found, wanted):
        return []
    # Where two patterns give two results nothing was written.
    unset = int((wanted != _replay(parameter, calls, loader, _PATTERN ^ 0xFF)).sum())
    if unset:
        why = f"{names} set all but {unset} of its elements"
        return [error("parameter-without-origin", name, why, "export the draft again")]
    count = int((found != wanted).sum())
    why = f"{count} of its {len(found)} elements are not those of {names}"
    return [error("file-changed", name, why, "start the server again")]


def _replay(
    parameter: Any, calls: list[_Call], loader: Callable[..., Any], pattern: int
) -> torch.Tensor:
    """The bits that a parameter's loader writes over a pattern, on the host."""
    held = parameter.data
    buffer = torch.empty(held.shape, dtype=held.dtype)
    buffer.view(-1).view(torch.uint8).fill_(pattern)
    parameter.data = buffer
    try:
        for call in calls:
            loader(parameter, call.value, *call.args, **call.kwargs)
        return _bits(parameter.data)
    finally:
        parameter.data = held


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, on the host: NaN equals NaN, and 0 not -0."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(_INTEGER[tensor.element_size()])
