"""Entry point ``sglang.srt.plugins``: our model class and strict loading in SGLang.

SGLang (since 0.5.11) calls ``register`` in its launcher, schedulers and detokenizer.
Nothing of SGLang is imported here that a process has not imported by then: what
concerns a module waits until that module is imported, so that a server without any of
our drafts pays for three entries in a list. A failure is one warning, and SGLang is
left as it was; a draft that needs the class is then refused by SGLang itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from spec_export.findings import SpecExportError
from spec_export.serving import strict

logger = logging.getLogger(__name__)

OLDEST = (0, 5, 12)
LAUNCH = "sglang.srt.server_args.ServerArgs.check_server_args"
LOADER = "sglang.srt.model_loader.loader"
LOAD = f"{LOADER}.DefaultModelLoader.load_weights_and_postprocess"
REGISTRY = "sglang.srt.models.registry"
MODELS = "spec_export.serving.models"


def register() -> None:
    """Hook strict loading and the model class into SGLang."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(LAUNCH, _check_launch, HookType.AFTER)
        when_imported(REGISTRY, _add_models)
        when_imported(LOADER, _hook_loader)
    except Exception as problem:
        _warn("nothing was registered", problem)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module now, or right after somebody imports it.

    A failure of ``then`` is a warning.
    """
    module = sys.modules.get(name)
    if module is not None:
        _call(then, module)
    else:
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(MetaPathFinder):
    """Finds one module as all other finders do, and calls back when it has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Take part in the first import of the module and in no other."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self.then)
        return spec


class _Calling(Loader):
    """Another loader, and a call after it."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, which also takes its place again."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _call(self.then, module)


def _call(then: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        then(module)
    except Exception as problem:
        _warn(f"{module.__name__} was left as it is", problem)


def _warn(what: str, problem: Exception) -> None:
    logger.warning(
        "spec-export and this SGLang (%s) do not fit together: %s; drafts that need "
        "the plug-in are refused (%s: %s)",
        sglang_release(),
        what,
        type(problem).__name__,
        problem,
    )


def sglang_release() -> str:
    """The version of SGLang in this process."""
    return str(getattr(sys.modules.get("sglang"), "__version__", "unknown"))


def _add_models(registry: ModuleType) -> None:
    from packaging.version import InvalidVersion, Version

    try:
        old = Version(sglang_release()).release < OLDEST
    except InvalidVersion:  # a build of its own; the import below decides
        old = False
    if old:
        raise RuntimeError("the model class needs SGLang >= 0.5.12")
    # Not through ModelRegistry.register, which imports all of SGLang's models first
    # where SGLANG_EXTERNAL_MODEL_PACKAGE has made that unnecessary.
    ours = registry.import_model_classes(MODELS, strict=True)
    registry.ModelRegistry.models.update(ours)


def _hook_loader(loader: ModuleType) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOAD, _around_load, HookType.AROUND)
    HookRegistry.apply_hooks()  # does nothing to those that are applied already


def _check_launch(result: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    try:
        strict.check_launch(
            getattr(server_args, "speculative_draft_model_path", None),
            getattr(server_args, "model_path", None),
            sglang_release(),
        )
    except SpecExportError:
        raise
    except Exception as problem:
        if strict.mode() == "on":
            raise
        logger.warning(
            "spec-export could not check the draft (%s: %s)",
            type(problem).__name__,
            problem,
        )


def _around_load(original: Callable[..., Any], model: Any, *args: Any) -> Any:
    """Let a model's first loading be compared with its manifest.

    Done around ``model.load_weights`` and not after the whole: what follows may
    quantise the parameters.
    """
    own = type(model).__module__.startswith(f"{MODELS}.")  # does it by itself
    if own or strict.draft_folder(model) is None:
        return original(model, *args)
    load = model.load_weights
    model.load_weights = lambda weights: strict.load_weights(model, load, weights)
    try:
        return original(model, *args)
    finally:
        del model.load_weights
