"""What SGLang would make of a draft folder: names, shapes, configuration, token map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packaging.version import Version

from spec_export.artifact.target import Target
from spec_export.artifact.values import check_vocab_map
from spec_export.artifact.weights import WeightFiles, read_json
from spec_export.findings import Finding, error, warning
from spec_export.layout.catalog import template_of_class
from spec_export.layout.loader import check_folder, text_part
from spec_export.layout.served_dtype import dtype_flag
from spec_export.layout.target_rope import unread_rope
from spec_export.layout.targets import context_length, target_classes
from spec_export.layout.variables import dig


def contents_findings(
    folder: Path, target: Target | None, release: Version
) -> list[Finding]:
    """What a release of SGLang makes of config.json, names, shapes and token map.

    Args:
        folder: A draft folder, with a manifest of ours or without.
        target: The target that will be served; what only it can tell is left out
            without one.
        release: Whose loader is asked.

    Raises:
        SpecExportError: for files that cannot be read.
    """
    config = read_json(folder / "config.json")
    files = WeightFiles.open(folder, every_file=True)
    findings = list(files.findings)
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    template = template_of_class(str(names[0])) if names else None
    if template is None:
        findings.append(
            error(
                "config-invalid",
                "architectures",
                f"is {named!r}; no draft class of SGLang that spec-export knows",
                "is this a draft? a speculators checkpoint has to be finalized first",
            )
        )
        return findings
    if len(names) > 1:
        findings.append(
            error(
                "config-invalid",
                "architectures",
                f"is {named!r}: SGLang takes the first name that it knows, silently",
                "keep one name",
            )
        )
    findings += check_folder(
        template, config, files.tensors, release, _default_ids(config, target)
    )
    findings += _token_map(config, files, target)
    if template.speculators_type != "mtp":  # a whole target may be quantised
        findings += _quantised(config, files)
    if target is not None:
        findings += _fit(text_part(config), target)
        findings += dtype_flag(config, target.config)[1]
        findings += unread_rope(target.config)
    return findings


def _default_ids(config: dict[str, Any], target: Target | None) -> bool:
    """Whether the layer ids are SGLang's default set; without a target, unknown."""
    ids = dig(config, "eagle_config.eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list):
        return True
    depth = target.num_hidden_layers if target is not None else None
    if depth is None or not all(isinstance(i, int) for i in ids):
        return False
    return sorted(ids) == [1, depth // 2 - 1, depth - 4]


def _quantised(config: dict[str, Any], files: WeightFiles) -> list[Finding]:
    """A draft that says it is quantised: SGLang honours that, whatever the weights."""
    given = config.get("quantization_config")
    if not given or not all(
        tensor.is_float and name.endswith((".weight", ".bias"))
        for name, tensor in files.tensors.items()
        if name not in ("d2t", "t2d")
    ):
        return []
    if isinstance(given, dict) and given.get("quant_algo", "") is None:
        return []  # ModelOpt's way to say that it is not
    method = given.get("quant_method") if isinstance(given, dict) else given
    return [
        error(
            "config-invalid",
            "quantization_config",
            f"says {method!r}, but every weight is a plain matrix: SGLang would read "
            "it as a quantised one, or quantise it",
            "remove the key",
        )
    ]


def _token_map(
    config: dict[str, Any], files: WeightFiles, target: Target | None
) -> list[Finding]:
    name = next((n for n in files.tensors if "d2t" in n), None)
    if name is None:
        return []
    head = files.tensors.get("lm_head.weight")
    vocab = config.get("vocab_size")
    t2d = files.read("t2d") if "t2d" in files.tensors else None
    return check_vocab_map(
        files.read(name),
        t2d,
        vocab if isinstance(vocab, int) and 0 < vocab < 2**31 else None,
        head.shape[0] if head is not None and head.shape else None,
    )


def _fit(config: dict[str, Any], target: Target) -> list[Finding]:
    findings = []
    text = target.text_config
    sizes = {"hidden_size": "target-hidden-size", "vocab_size": "config-invalid"}
    for key, code in sizes.items():
        if config.get(key) != text.get(key):
            findings.append(
                error(
                    code,
                    key,
                    f"is {config.get(key)}, the target {target.name} has "
                    f"{text.get(key)}",
                    "serve the target of the training",
                )
            )
    mine, theirs = context_length(config), context_length(text)
    if mine < theirs:
        findings.append(
            warning(
                "context-too-short",
                "max_position_embeddings",
                f"gives the draft a context of {mine} tokens, the target has {theirs}; "
                "SGLang refuses to start",
                f"start the server with --context-length {mine}, or set "
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            )
        )
    depth = target.num_hidden_layers
    if depth is None:
        return findings
    known = target_classes().get((target.architectures or [""])[0])
    last = depth if known is not None and known.last is not None else depth - 1
    for key, least, most in (
        ("eagle_config.eagle_aux_hidden_state_layer_ids", -1, last),
        ("dflash_config.target_layer_ids", 0, depth - 1),
        ("target_layer_ids", 0, depth - 1),
    ):
        ids = dig(config, key)
        if not isinstance(ids, list):
            continue
        wrong = [i for i in ids if not isinstance(i, int) or not least <= i <= most]
        if wrong:
            findings.append(
                error(
                    "layer-ids-invalid",
                    key,
                    f"id {wrong[0]} of {ids}: the target {target.name} has {depth} "
                    "layers",
                    "serve the target of the training",
                )
            )
    return findings
