"""The config.json that a training will write, before anything is trained.

speculators' own functions decide, from flags to the model class: a subclass whose
``__init__`` stops hands out the configuration it was given. So no module is built,
no weight is read and nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import ValidationError
from speculators.train import cli as speculators_cli
from speculators.train.config import TrainConfig, resolution
from speculators.utils.loading import is_config_only_dir
from transformers import PretrainedConfig

from spec_export.artifact.signals import undisturbed
from spec_export.findings import (
    Finding,
    SpecExportError,
    error,
    usage_error,
    warning,
)

# Families whose configuration holds no mask token although the flag exists.
_WITHOUT_MASK_TOKEN = frozenset({"eagle3", "mtp"})


@dataclass(frozen=True)
class ResolvedDraft:
    """What a recipe or a command line will train.

    Attributes:
        config: The speculators config.json that a checkpoint will hold.
        speculator_type: speculators' name of the family, ``eagle3`` and so on.
        save_path: Where the trainer writes checkpoints, as given.
        verifier: Path or name of the target, as given.
        flags: speculators' flags by name, defaults filled in.
        findings: Warnings about what could only be assumed.
    """

    config: dict[str, Any]
    speculator_type: str
    save_path: Path
    verifier: str
    flags: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)


class _ConfigCaptured(Exception):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def resolve_draft(
    recipe: Path | Sequence[str], target: Path | None = None
) -> ResolvedDraft:
    """Find out what a recipe will train.

    Args:
        recipe: A recipe file, or the arguments of ``speculators train``.
        target: A folder that stands in for the recipe's target; its config.json
            is enough.

    Returns:
        The draft's configuration and what it was made of.

    Raises:
        SpecExportError: exit 1 ``target-needed`` if the target's configuration
            cannot be read; exit 2 ``recipe-invalid`` for what speculators
            itself refuses.
        SystemExit: exit 2 for arguments that speculators' parser refuses.
    """
    argv = ["--config", str(recipe)] if isinstance(recipe, Path) else list(recipe)
    return resolve_train_config(_train_config(argv), target)


def _train_config(argv: list[str]) -> TrainConfig:
    parsed = vars(resolution.build_parser().parse_args(argv))
    config_path = parsed.pop("config")
    parsed.pop("dump_config")
    backend = {k: parsed.pop(k) for k in list(parsed) if k in resolution._BACKEND_DESTS}
    try:
        with _quietly():
            return TrainConfig.from_sources(
                cli=parsed, config_path=config_path, argv=argv, backend_cli=backend
            )
    except ValidationError as problem:
        raise SpecExportError(
            [
                error("recipe-invalid", ".".join(map(str, one["loc"])), one["msg"])
                for one in problem.errors()
            ],
            exit_code=2,
        ) from problem
    except resolution.ConfigError as problem:
        raise usage_error("recipe-invalid", "train", str(problem)) from problem


def resolve_train_config(
    train_config: TrainConfig, target: Path | None = None
) -> ResolvedDraft:
    """``resolve_draft`` for a configuration that speculators has resolved.

    Args:
        train_config: Left as it is.
        target: As for ``resolve_draft``.

    Raises:
        SpecExportError: As for ``resolve_draft``.
    """
    flags = train_config.flatten()
    verifier = flags["verifier_name_or_path"]
    args = argparse.Namespace(**copy.deepcopy(flags))
    if target is not None:
        args.verifier_name_or_path = str(target)
    with _quietly():
        target_config = _target_config(args)
        findings: list[Finding] = []
        vocab_size = _draft_vocab_size(args, target_config.vocab_size, findings)
        mask_is_known = _settle_mask_token(args, findings)
        config = _capture(args, vocab_size)
    if not mask_is_known:
        config.mask_token_id = None
    if target is not None and not args.from_pretrained:
        config.speculators_config.verifier.name_or_path = verifier
    return ResolvedDraft(
        config=checkpoint_config(config, "bfloat16"),
        speculator_type=args.speculator_type,
        save_path=Path(args.save_path),
        verifier=verifier,
        flags=flags,
        findings=findings,
    )


def checkpoint_config(config: PretrainedConfig, dtype: str) -> dict[str, Any]:
    """The config.json that speculators writes beside a checkpoint.

    Args:
        config: A draft's configuration; left as it is.
        dtype: Name of the float format of the saved tensors.

    Returns:
        The content without ``auto_map``, which only names speculators' own file.
    """
    # pydantic makes an error of its own of whatever is raised in it: a signal would get
    # lost, and the training would go on.
    with undisturbed():
        content = json.loads(config.to_json_string())
    model_class = _model_class(content["speculators_model_type"])
    content["architectures"] = [model_class.__name__]
    content["dtype"] = dtype
    content.setdefault("tie_word_embeddings", False)  # as the module's __init__ does
    content.pop("auto_map", None)
    return content


def _model_class(speculator_type: str) -> type:
    with _quietly():
        registry = speculators_cli.SpeculatorModel.registry or {}
    if speculator_type not in registry:
        raise usage_error(
            "family-unsupported",
            "speculator_type",
            f"speculators has no draft type {speculator_type}",
            f"one of {', '.join(sorted(registry))}",
        )
    return registry[speculator_type]


def _target_config(args: argparse.Namespace) -> PretrainedConfig:
    name = args.verifier_name_or_path
    try:
        _require_local_config(name)
        return speculators_cli.get_verifier_config(
            name, trust_remote_code=args.trust_remote_code
        )
    except Exception as problem:  # transformers raises what its parsers raise
        why = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise SpecExportError(
            [
                error(
                    "target-needed",
                    "verifier_name_or_path",
                    f"the configuration of the target {name} cannot be read: {why}",
                    "name a folder with the target's config.json in the recipe; "
                    "`check` also takes --target DIR",
                )
            ]
        ) from problem


def _require_local_config(name: str) -> None:
    """Say plainly that a path is wrong; transformers takes it for a hub name."""
    is_path = Path(name).is_absolute() or name.startswith((".", "~"))
    if (is_path or name.count("/") > 1) and not (Path(name) / "config.json").is_file():
        raise FileNotFoundError("there is no config.json")


def _draft_vocab_size(
    args: argparse.Namespace, full: int, findings: list[Finding]
) -> int | None:
    """Decide the draft's vocabulary as ``parse_vocab_mappings`` does, from headers."""
    if args.speculator_type == "mtp":
        return None
    wanted = args.draft_vocab_size
    if args.d2t_path or args.t2d_path:
        if not (args.d2t_path and args.t2d_path):
            _refuse("draft", "--d2t-path and --t2d-path have to be given together")
        return _map_size(Path(args.d2t_path), wanted)
    if wanted is None:
        return full
    data = Path(args.data_path)
    cached = data / f"d2t-{wanted}.npy"
    if cached.exists() and (data / f"t2d-{wanted}.npy").exists():
        return _map_size(cached, wanted)
    frequencies = Path(args.token_freq_path or data / "token_freq.pt")
    if not frequencies.exists():
        findings.append(
            warning(
                "vocab-map-absent",
                "draft.draft_vocab_size",
                f"neither {cached.name} nor {frequencies.name} is there, and without "
                f"them speculators trains all {full} tokens silently; the plan "
                f"assumes {wanted}",
                "run speculators prepare-data with --no-skip-token-freq before",
            )
        )
    return wanted


def _map_size(path: Path, wanted: int | None) -> int:
    """Length of a draft-to-target map, read from the header of its file."""
    try:
        size = int(np.load(path, mmap_mode="r", allow_pickle=False).shape[0])
    except (OSError, ValueError, IndexError) as problem:
        raise usage_error(
            "vocab-map-invalid", path.name, f"it is no token map: {problem}"
        ) from problem
    if wanted is not None and wanted != size:
        _refuse(
            "draft.draft_vocab_size",
            f"it is {wanted}, but the map {path.name} has {size} tokens",
        )
    return size


def _settle_mask_token(args: argparse.Namespace, findings: list[Finding]) -> bool:
    """Make sure that no tokenizer is fetched; say whether the mask token is known."""
    if args.speculator_type in _WITHOUT_MASK_TOKEN or args.from_pretrained:
        args.mask_token_id = 0  # asked for by speculators, used by nothing
        return True
    folder = Path(args.verifier_name_or_path)
    if args.mask_token_id is not None or any(folder.glob("tokenizer*")):
        return True
    findings.append(
        warning(
            "target-needed",
            "mask_token_id",
            "it comes from the target's tokenizer, which is not at hand",
            "set --mask-token-id, or --target to a folder with the tokenizer",
        )
    )
    args.mask_token_id = 0
    return False


def _capture(args: argparse.Namespace, vocab_size: int | None) -> Any:
    """Run speculators' model construction up to the constructor."""
    model_class = _model_class(args.speculator_type)
    if args.from_pretrained:
        _require_speculators_format(args.from_pretrained)

    def stop(_self: Any, config: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _ConfigCaptured(config)

    def stop_loading(
        cls: Any, path: str, *_args: Any, config: Any = None, **_kwargs: Any
    ) -> NoReturn:
        raise _ConfigCaptured(config or cls.config_class.from_pretrained(path))

    probe = type(
        model_class.__name__,
        (model_class,),
        {"__init__": stop, "from_pretrained": classmethod(stop_loading)},
    )
    try:
        speculators_cli.build_draft_model(args, probe, None, None, vocab_size)
    except _ConfigCaptured as captured:
        return captured.config
    except (ValueError, AttributeError, KeyError, OSError) as problem:
        why = str(problem)
        if isinstance(problem, ValidationError):
            why = "; ".join(one["msg"] for one in problem.errors())
        raise usage_error(
            "recipe-invalid", "train.draft", f"speculators cannot build this: {why}"
        ) from problem
    raise AssertionError("speculators built the draft without its constructor")


def _require_speculators_format(path: str) -> None:
    try:
        content, _ = PretrainedConfig.get_config_dict(path)
    except OSError as problem:
        raise usage_error(
            "path-missing", "draft.from_pretrained", f"{path} has no config.json"
        ) from problem
    if "speculators_model_type" not in content and not is_config_only_dir(path):
        _refuse(
            "draft.from_pretrained",
            f"{path} is no speculators checkpoint; speculators converts it when "
            "training starts, and what that gives is not known before",
            "convert it first: speculators convert",
        )


def _refuse(subject: str, message: str, hint: str | None = None) -> NoReturn:
    raise usage_error("recipe-invalid", subject, message, hint)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep speculators from telling twice what it tells when training starts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
