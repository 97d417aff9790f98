"""Inputs of a comparison and the logits of the training side.

The only place outside ``training/`` that imports speculators, and only its model
classes.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from spec_export.findings import SpecExportError, error
from spec_export.judge.block_probe import block_logits, is_block
from spec_export.judge.inputs import Inputs
from spec_export.judge.modes import OwnRandomness
from spec_export.judge.mtp_probe import is_mtp, main_weight, mtp_logits
from spec_export.judge.stored_probe import Probe, load_probe, save_probe

__all__ = [
    "Inputs",
    "Probe",
    "drafting_module",
    "load_probe",
    "save_probe",
    "training_logits",
    "training_module",
]

# speculators_model_type -> module and class of the real thing.
MODULES = {
    "eagle3": ("speculators.models.eagle3.core", "Eagle3DraftModel"),
    "dflash": ("speculators.models.dflash.core", "DFlashDraftModel"),
    "dflash2": ("speculators.models.dflash2.core", "DFlash2DraftModel"),
    "dspark": ("speculators.models.dspark.core", "DSparkDraftModel"),
    "mtp": ("speculators.models.mtp.core", "MTPDraftModel"),
}
# Used by the loss only; the checkpoint does not hold them.
LOSS_ONLY = ("verifier_lm_head", "verifier_norm")


# --- the training side -------------------------------------------------------------


def training_module(
    checkpoint_config: Mapping[str, Any],
    read: Callable[[str], torch.Tensor],
    names: Collection[str],
    dtype: torch.dtype = torch.float32,
    target_embedding: torch.Tensor | None = None,
    *,
    saved_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    empty: nn.Module | None = None,
) -> nn.Module:
    """Build the model class of speculators itself, filled from a checkpoint.

    Built on the meta device and filled tensor by tensor, so that no second copy
    exists. Nothing is looked up on the network and no verifier is loaded. The
    embedding is kept in its stored dtype and its rows are cast: it is most of the
    bytes and never computed with.

    Args:
        checkpoint_config: The checkpoint's ``config.json``.
        read: Reads one tensor of the checkpoint.
        names: Names in the checkpoint.
        dtype: Dtype of the computation.
        target_embedding: The target's, for a checkpoint without ``embed_tokens``
            (which would otherwise draft from zeros, without an error).
        saved_dtype: Round each float tensor to the dtype of the export first.
        device: Where to compute.
        empty: From ``empty_module``, to be filled: another thread than that of a
            training must not make one.

    Raises:
        SpecExportError: an unknown draft type, or tensors that do not fit the class.
    """
    model = empty_module(checkpoint_config) if empty is None else empty
    for name in LOSS_ONLY:
        if hasattr(model, name):
            # Block drafts run them in every forward, for targets that nobody reads.
            setattr(model, name, nn.Identity() if is_block(model) else None)
    slots = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    problems = []
    for name in sorted(names):
        if name.split(".")[0] in LOSS_ONLY:
            continue
        slot = slots.pop(name, buffers.get(name))
        if slot is None:
            problems.append(
                error("tensor-unexpected", name, "the class has no such tensor")
            )
            continue
        value = read(name)
        if value.shape != slot.shape:
            found, wanted = list(value.shape), list(slot.shape)
            message = f"has shape {found}, the training class {wanted}"
            problems.append(error("shape-mismatch", name, message))
            continue
        if saved_dtype is not None and value.is_floating_point():
            value = value.to(saved_dtype)
        _fill(model, name, value, dtype, device)
    if "embed_tokens.weight" in slots and target_embedding is not None:
        slots.pop("embed_tokens.weight")
        value = target_embedding.detach()
        if saved_dtype is not None:
            value = value.to(saved_dtype)
        _fill(model, "embed_tokens.weight", value, dtype, device)
    problems += [
        error("tensor-missing", name, "the training class needs it") for name in slots
    ]
    if problems:
        raise SpecExportError(problems)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(device)
    # Past torch.compile, for good: not every thread may set its stance.
    plain = getattr(type(model).forward, "_torchdynamo_orig_callable", None)
    if plain is not None:
        model.forward = MethodType(plain, model)
    embed = drafting_module(model).embed_tokens
    embed.register_forward_hook(lambda _module, _args, rows: rows.to(dtype))
    return model.eval().requires_grad_(False)


def empty_module(checkpoint_config: Mapping[str, Any]) -> nn.Module:
    """The training class on the meta device, for ``training_module`` to fill.

    Raises:
        SpecExportError: for an unknown draft type.
    """
    kind = checkpoint_config.get("speculators_model_type")
    if kind not in MODULES:
        raise SpecExportError(
            [
                error(
                    "comparison-not-run",
                    "speculators_model_type",
                    f"no training side for draft type {kind!r}",
                    f"there is one for {', '.join(MODULES)}",
                )
            ]
        )
    from accelerate import init_empty_weights

    path, name = MODULES[kind]
    cls = getattr(importlib.import_module(path), name)
    config = cls.config_class(**copy.deepcopy(dict(checkpoint_config)))
    config.transformer_layer_config._attn_implementation, _ = _dense_attention()
    with init_empty_weights():
        model: nn.Module = cls(config)
    return model


def _fill(
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value.to(device)
        return
    if name != "embed_tokens.weight":
        value = value.to(dtype)
    owner._parameters[leaf] = nn.Parameter(value.to(device), requires_grad=False)


def drafting_module(module: Any) -> Any:
    """The draft inside DDP (``module``) or ``torch.compile`` (``_orig_mod``)."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


@contextmanager
def _probing(draft: Any, device: torch.device) -> Iterator[None]:
    """Evaluation without traces: mode, attention, RNG and grad state are put back."""
    modes = {m: m.training for m in draft.modules()}
    layer_config = draft.config.transformer_layer_config
    before = (
        draft._attn_impl,
        draft._create_mask_fn,
        layer_config._attn_implementation,
    )
    cuda = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            # hooks may be ignored in compiled code
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            # Both are the process's, and a training may go on beside this thread.
            stack.enter_context(OwnRandomness(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        try:
            draft.eval()
            if draft._attn_impl == "simple_flex_attention":
                # Flex attention pads to whole blocks and needs a compiler to be
                # affordable; the mask is the same.
                draft._attn_impl, draft._create_mask_fn = _dense_attention()
                layer_config._attn_implementation = draft._attn_impl
            yield
        finally:
            draft._attn_impl, draft._create_mask_fn = before[0], before[1]
            layer_config._attn_implementation = before[2]
            for submodule, mode in modes.items():
                submodule.training = mode


@functools.cache
def _dense_attention() -> tuple[str, Callable[..., torch.Tensor]]:
    """The attention that computes what flex attention does, and its masks.

    In speculators 0.8 eager attention hides nothing of an EAGLE-3 draft's own tokens:
    the columns that each step adds to the mask are 1 and 0 instead of 0 and -inf.
    """
    from speculators.models.eagle3 import attention
    from torch.nn.attention.flex_attention import create_mask

    grown = attention.extend_dense_mask_for_draft_tokens(torch.zeros(1, 1, 2, 2), 2)
    if grown[0, 0, 0, 3] == -math.inf:
        return "eager", _float_mask
    return "sdpa", create_mask


def _float_mask(mask_mod: Any, **sizes: Any) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_mask

    seen = create_mask(mask_mod, **sizes)
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)


Hook = Callable[[str, torch.Tensor], None]


def training_logits(
    module: nn.Module,
    inputs: Inputs,
    steps: int = 3,
    *,
    on_output: Hook | None = None,
    compute: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Logits of the training class, teacher forced as in training.

    Works on a module that is being trained: plain, under DDP (the inner module is
    used), compiled (runs eagerly), under FSDP2 (then every rank must call this, since
    a forward is a collective). Autocast is off; mode, RNG, grad state and attention
    implementation are as before when it returns, and no hook stays.

    Args:
        module: speculators' draft, or a wrapper of it.
        inputs: The rows.
        steps: Chained draft steps; of a block draft, proposals.
        on_output: Called with (module name + ``.in``, first input) and then (module
            name, output) for each module, in order; for a diagnosis.
        compute: Dtype of the features that enter, the module's by default; another
            one goes with weights changed to it (``modes.ChangedWeights``).

    Returns:
        Per step [T, draft vocabulary] on the module's device.
    """
    draft = drafting_module(module)
    parameter = main_weight(draft)
    device, dtype = parameter.device, parameter.dtype
    logits: list[torch.Tensor] = []
    handles = []
    if not is_block(draft) and not is_mtp(draft):
        handles.append(draft.lm_head.register_forward_hook(_collector(logits)))
    if on_output is not None:
        for name, part in draft.named_modules():
            handles.append(part.register_forward_hook(_reporter(name, on_output)))
    try:
        if is_mtp(draft):
            return mtp_logits(draft, inputs, steps, compute or dtype)
        with _probing(draft, device):
            if is_block(draft):
                return block_logits(draft, inputs, steps, compute or dtype)
            draft(
                hidden_states=inputs.aux.to(device, dtype).to(compute or dtype)[None],
                input_ids=inputs.token_ids.to(device)[None],
                document_ids=inputs.document_ids.to(device)[None],
                position_ids=inputs.position_ids.to(device)[None],
                ttt_steps=steps,
            )
    finally:
        for handle in handles:
            handle.remove()
    return logits


def _collector(into: list[torch.Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        into.append(output.detach()[0])

    return hook


def _reporter(name: str, on_output: Hook) -> Callable[..., None]:
    def hook(_part: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor):
            on_output(f"{name}.in", args[0].detach()[0])
        if isinstance(output, torch.Tensor):
            on_output(name, output.detach()[0])

    return hook


def free_chain(
    module: nn.Module, document: Inputs, steps: int, first: torch.Tensor
) -> tuple[Inputs, torch.Tensor]:
    """Let the training side draft freely, ``steps`` rows before a document's end.

    Args:
        module: speculators' draft.
        document: Rows of one document.
        steps: Drafted tokens.
        first: The draft id that the first step chose.

    Returns:
        The rows with each drafted token where the next step looks for it, and the
        draft ids that were fed back [steps - 1].
    """
    draft, row = drafting_module(module), len(document) - steps
    tokens, drafted = document.token_ids.clone(), []
    for step in range(1, steps):
        chosen = first
        if step > 1:
            rows = replace(document, token_ids=tokens)
            chosen = training_logits(module, rows, step)[-1][row].argmax()
        drafted.append(chosen.cpu())
        tokens[row + step] = to_target(draft, chosen).cpu()
    ids = torch.stack(drafted) if drafted else torch.zeros(0, dtype=torch.long)
    return replace(document, token_ids=tokens), ids


def to_target(draft: Any, draft_ids: torch.Tensor) -> torch.Tensor:
    """Draft ids -> target ids as speculators defines ``d2t``: an offset."""
    offsets = getattr(draft, "d2t", None)
    if offsets is None:
        return draft_ids
    return draft_ids + offsets.to(draft_ids.device)[draft_ids]


def target_ids(module: nn.Module) -> torch.Tensor:
    """Target id of each draft id, int64 [draft vocabulary]."""
    draft = drafting_module(module)
    return to_target(draft, torch.arange(draft.lm_head.weight.shape[0]))
