"""What spec-export can say about a draft: findings, their codes, the one error type.

A finding is data; only ``cli`` prints it. Codes are stable: scripts match on
them, ``--allow`` names them and the manifest records them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How much a finding matters: an ``error`` means the answer is no."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One thing that is true about a draft and that a person should know.

    Attributes:
        code: Stable key of ``CODES``.
        severity: error, warning or info.
        subject: The tensor, config key (dotted) or file it is about.
        message: What is the case, with both values where two disagree.
        hint: What to do about it; names the flag to change.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The finding as the ``--json`` object."""
        return {**asdict(self), "severity": str(self.severity)}


@dataclass(frozen=True)
class Code:
    """What a code means and whether ``--allow`` may accept it.

    Attributes:
        meaning: One sentence for the README's table.
        allowable: A deviation, or a difference that a deployer may know to be
            harmless; allowed codes become warnings and are recorded.
    """

    meaning: str
    allowable: bool = False


CODES: dict[str, Code] = {}


def _codes(allowable: bool, **meanings: str) -> None:
    for name, meaning in meanings.items():
        CODES[name.replace("_", "-")] = Code(meaning, allowable)


# Deviations: SGLang would not compute what was trained.
_codes(
    True,
    norm_before_residual="stock SGLang has no norm_before_residual",
    norm_before_residual_unknown="nothing records the norm_before_residual of training",
    qk_norm_dropped="stock SGLang's EAGLE-3 class has no q/k norm and drops it",
    attention_bias_dropped="stock SGLang's EAGLE-3 class has no q/k/v/o bias",
    mlp_bias_dropped="stock SGLang's EAGLE-3 class has no MLP bias",
    layer_types_mixed="one launch flag sets the window of all draft layers",
    single_aux_layer="SGLang skips fc when the feature has the draft's width",
    trained_embedding="SGLang replaces the draft's embedding by the target's",
    trained_head="SGLang would replace a trained head by the target's",
    target_differs="the target is not the one the draft was trained with",
    target_rope_unread="SGLang does not read the target's RoPE in this spelling",
    target_unknown_family="no capture rule is known for this target",
    vocab_map_identity="a token map of zeros maps draft id i to target id i",
    reduced_vocabulary="the serving class has no token map",
    sample_from_anchor="the serving class starts sampling at another slot",
    sliding_window_extent="SGLang counts the window of a block differently",
    forward_differs="SGLang's forward and the training module disagree",
    mtp_first_step="SGLang gives MTP the target's state after the final norm",
    embedding_scale_rounded="weights that are scaled for the target are rounded again",
    mask_token_is_special="the mask token of a block draft has another meaning too",
)
_codes(
    False,
    # The plan: tensors, shapes, flags
    rope_untranslatable="SGLang computes this RoPE differently",
    tensor_unaccounted="no rule of the template takes this source tensor",
    parameter_without_origin="a serving parameter would get no value",
    tensor_missing="a tensor that the configuration promises is absent",
    tensor_unexpected="a tensor is present although its flag says it is not",
    shape_mismatch="a tensor has another shape than the configuration says",
    config_invalid="a configuration value is missing or impossible",
    activation_unsupported="SGLang's class supports silu only",
    family_unsupported="no SGLang class serves this speculators draft type",
    layer_ids_unknown="the auxiliary layer ids are not recorded",
    layer_ids_invalid="an auxiliary layer id does not exist in the target",
    layer_id_uncapturable="the target's SGLang class cannot capture this layer",
    target_hidden_size="the draft's width differs from the target's",
    release_too_old="the requested SGLang release lacks something this draft needs",
    release_unknown="a release newer than the newest known one",
    cuda_graph_layer_ids="custom layer ids are lost in CUDA graphs before 0.5.11",
    sliding_window_flag="the window of the draft is a launch flag of the server",
    dtype_differs="by itself SGLang gives draft and target different dtypes",
    context_too_short="the draft's max_position_embeddings is below the context",
    embedding_flag_no_effect="embed_requires_grad has no effect in EAGLE-3",
    embedding_only_in_target="the embedding comes from the target, not the export",
    vocab_map_absent="a reduced vocabulary would be trained, but no map exists yet",
    exact_rewrite="the draft is written for another SGLang class, which is exact",
    confidence_head_absent="the draft has no confidence head",
    mask_row_zero="the target's embedding of the mask token is all zeros",
    plugin_needed="stock SGLang cannot serve this draft exactly, the plug-in can",
    plugin_required="the export is written for the spec-export serving plug-in",
    # Values
    non_finite="a tensor holds NaN or infinity",
    all_zero="a tensor that cannot be zero is all zeros",
    dtype_unsupported="a tensor has a dtype that is no plain weight",
    dtype_cast="float tensors of several dtypes were cast to one",
    vocab_map_invalid="the token map is broken",
    head_packed="the target's head is packed or quantised",
    quantization_dropped="a leftover quantization_config was not exported",
    tie_flag_dropped="an inherited tie_word_embeddings was not exported",
    optimizer_no_change="a tensor in the optimizer did not move in training",
    nothing_trained="no tensor moved since the first step",
    # The target
    target_needed="the target's config or weights are needed and missing",
    target_weights_missing="the target's weights are not at hand",
    target_unsupported="this SGLang release cannot capture features of the target",
    target_path_relative="the checkpoint names its target by a relative path",
    # Files
    file_missing="a file that is named is not there",
    file_corrupt="a file cannot be read as what it says it is",
    file_unlisted="a file that SGLang would load is not in the manifest",
    file_changed="a file is not the one that the manifest describes",
    file_contradiction="two places say different things about one tensor",
    path_escape="a file name leads out of the folder",
    path_mistral="SGLang parses a path with eagle and mistral as a Mistral folder",
    manifest_missing="the folder has no spec-export manifest",
    manifest_invalid="the manifest cannot be read",
    export_failed_status="the export is marked failed: its comparison failed",
    export_saved="the export was saved in training and not finalized",
    export_ignored="a file beside the weights was not copied",
    checkpoint_chosen="which checkpoint of the folder was taken, and why",
    runs_mixed="the best and the latest export are of different trainings",
    checkpoint_incomplete="a checkpoint of the folder is not complete",
    name_dropped="SGLang drops a tensor of this name silently",
    # The judge
    comparison_failed="the forward comparison failed",
    comparison_reduced="fewer positions were compared than asked for",
    comparison_not_run="the forward comparison could not run",
    # Recipe and usage
    recipe_invalid="the recipe does not parse",
    callbacks_misplaced="the callbacks block is not beside train",
    callbacks_missing="the recipe has no callbacks block, so it exports nothing",
    callback_unknown="a class path that is not ours",
    callback_argument="an argument of the callback is wrong",
    output_inside_save_path="save_best deletes strangers inside save_path",
    output_exists="the output path exists",
    output_unwritable="the output path cannot be written",
    path_missing="the path does not exist or holds no model",
    option_invalid="an option has a value that is not possible",
    dependency_missing="a package that this command needs is not installed",
    disk_full="no space is left on the device",
    adapted="what was adapted to this machine",
    export_error="an export failed and training went on",
    internal_error="a bug in spec-export",
)


def finding(
    severity: Severity, code: str, subject: str, message: str, hint: str | None = None
) -> Finding:
    """Build a finding; the code has to be in ``CODES`` (a test holds the reverse)."""
    if code not in CODES:
        raise KeyError(f"unknown finding code {code!r}")
    return Finding(code, severity, subject, message, hint)


def error(code: str, subject: str, message: str, hint: str | None = None) -> Finding:
    """An error finding: the answer is no."""
    return finding(Severity.ERROR, code, subject, message, hint)


def warning(code: str, subject: str, message: str, hint: str | None = None) -> Finding:
    """A warning finding: served, but someone should act or know."""
    return finding(Severity.WARNING, code, subject, message, hint)


def info(code: str, subject: str, message: str, hint: str | None = None) -> Finding:
    """An info finding."""
    return finding(Severity.INFO, code, subject, message, hint)


# Deviations that no leg of the comparison sees: both sides get the same there.
_UNSEEN = frozenset(
    {
        "embedding-scale-rounded",
        "mask-token-is-special",
        "mtp-first-step",
        "target-rope-unread",
        "target-unknown-family",
    }
)


def explains_difference(leg: str, accepted: Iterable[str]) -> bool:
    """Whether accepted deviations are a reason for a leg of the comparison to fail.

    Args:
        leg: Its name; *cast* compares training with itself, so nothing explains it.
        accepted: Codes of the deviations.
    """
    return leg != "cast" and bool(set(accepted) - _UNSEEN)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether the answer is no."""
    return any(f.severity is Severity.ERROR for f in findings)


def apply_allow(findings: Iterable[Finding], allow: Iterable[str]) -> list[Finding]:
    """Turn allowed error findings into warnings.

    Args:
        findings: What was found.
        allow: Codes that the user accepts by name; each must be ``allowable``
            (``check_allow``).

    Returns:
        The findings in order, the allowed ones as warnings.
    """
    allowed = set(allow)
    return [
        replace(f, severity=Severity.WARNING)
        if f.severity is Severity.ERROR
        and f.code in allowed
        and CODES[f.code].allowable
        else f
        for f in findings
    ]


def check_allow(allow: Iterable[str]) -> None:
    """Refuse codes that do not exist or that nobody may allow.

    Raises:
        SpecExportError: exit code 2.
    """
    known = sorted(name for name, code in CODES.items() if code.allowable)
    for name in allow:
        if name not in CODES or not CODES[name].allowable:
            why = "is not a code" if name not in CODES else "cannot be allowed"
            raise SpecExportError(
                [
                    error(
                        "option-invalid",
                        "--allow",
                        f"{name} {why}",
                        f"codes that can be allowed: {', '.join(known)}",
                    )
                ],
                exit_code=2,
            )


class SpecExportError(Exception):
    """The answer is no (exit 1) or the question was wrong (exit 2).

    Attributes:
        findings: At least one error finding.
        exit_code: 1 or 2.
    """

    def __init__(self, findings: Iterable[Finding], exit_code: int = 1) -> None:
        self.findings = list(findings)
        self.exit_code = exit_code
        super().__init__(
            "\n".join(f"{f.code}: {f.subject}: {f.message}" for f in self.findings)
        )


def usage_error(
    code: str, subject: str, message: str, hint: str | None = None
) -> SpecExportError:
    """An error with exit code 2: the question was wrong or a path is not there."""
    return SpecExportError([error(code, subject, message, hint)], exit_code=2)
