"""The target: which of its layers SGLang can hand over, and how an id is spelled.

speculators counts a layer id as "residual after k layers"; SGLang counts it as
"output of layer k", with exceptions per target class. The classes and the
exceptions are data (``ckpt_templates/targets.yaml``); the named rules are here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from spec_export.findings import Finding, error
from spec_export.layout.data import data_path, read_yaml
from spec_export.layout.releases import newest_known

Hook = Literal["eagle3", "dflash"]
RuleName = Literal["output-of-layer", "first-is-one", "contains-last", "capture-point"]


class OlderRope(BaseModel):
    """A configuration class that reads only the older spelling of RoPE.

    Attributes:
        defaults: What it takes where that is not there.
        fails: Types in the newer spelling on which it fails, the older one beside it or
            not; it passes over the others.
        fails_since: First release that fails.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    defaults: dict[str, float]
    fails: list[str]
    fails_since: str


class TargetClass(BaseModel):
    """What SGLang's class of one target family can do.

    Attributes:
        eagle3: First release with the EAGLE-3 hook.
        dflash: First release with the DFlash hook.
        rule: How an explicit id list is read.
        rule_since: First release of an exceptional rule; before it the plain one.
        rule_not_for: Draft classes whose ids are read by the plain rule all the same.
        embedding: First release that can capture the embedding output (id 0).
        last: First release that can capture the last layer's output (id n).
        note: What happens when an uncapturable id is asked for.
        scaled_by_root_of: Key of the language model's configuration; block drafts get
            the embedding times the square root of its value. None: as it is stored.
        bare_tied_head: Where the head is tied it is a plain module, which DSPARK and
            DFlash2 cannot project through.
        older_rope: For a configuration class that reads only the older spelling of
            RoPE (``target_rope``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    eagle3: str | None = None
    dflash: str | None = None
    rule: RuleName = "output-of-layer"
    rule_since: str | None = None
    rule_not_for: list[str] = Field(default_factory=list)
    embedding: str | None = None
    last: str | None = None
    note: str | None = None
    scaled_by_root_of: str | None = None
    bare_tied_head: bool = False
    older_rope: OlderRope | None = None


@dataclass(frozen=True)
class TargetFacts:
    """What the layout has to know of a target.

    Attributes:
        config: Its config.json.
        text: The part of it that describes the language model.
        architecture: ``architectures[0]``.
        num_hidden_layers: Its depth.
        hidden_size: Its width.
        vocab_size: Rows of its embedding.
        context_length: What SGLang derives as its context, in tokens.
        head: Whether its weights hold a head, tie it to the embedding, or are
            not at hand.
    """

    config: Mapping[str, Any]
    text: Mapping[str, Any]
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    head: Literal["own", "tied", "packed", "missing"] = "missing"


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model inside a multimodal one."""
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return inner
    return config


def target_facts(
    config: Mapping[str, Any],
    head: Literal["own", "tied", "packed", "missing"] = "missing",
) -> TargetFacts:
    """Read a target's config.json.

    Raises:
        SpecExportError: if a key that decides layer ids is missing.
    """
    from spec_export.findings import SpecExportError

    text = language_model(config)
    values: dict[str, int] = {}
    problems: list[Finding] = []
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = text.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            problems.append(
                error(
                    "target-needed",
                    f"target config.json {key}",
                    f"is {value!r}, a positive number is needed",
                    "give the target's own folder with --target DIR",
                )
            )
        else:
            values[key] = value
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        problems.append(
            error(
                "target-needed",
                "target config.json architectures",
                f"is {named!r}; the layer-id rule depends on it",
                "give the target's own folder with --target DIR",
            )
        )
    if problems:
        raise SpecExportError(problems)
    return TargetFacts(
        config=config,
        text=text,
        architecture=str(config["architectures"][0]),
        context_length=context_length(text),
        head=head,
        **values,
    )


_MOST_TOKENS = 2**62  # a hostile number must not overflow a float


def context_length(config: Mapping[str, Any]) -> int:
    """SGLang's derived context in tokens (utils/hf_transformers/common.py)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = 1.0
    if (
        isinstance(scaling, Mapping)
        and "original_max_position_embeddings" not in scaling
        and scaling.get("rope_type") != "llama3"
    ):
        given = scaling.get("factor")
        if isinstance(given, int | float) and not isinstance(given, bool):
            factor = given if 0 < given <= sys.float_info.max else 1.0
    for key in (
        "max_sequence_length",
        "seq_length",
        "max_seq_len",
        "model_max_length",
        "max_position_embeddings",
    ):
        if isinstance(config.get(key), int):
            return int(min(factor * min(config[key], _MOST_TOKENS), _MOST_TOKENS))
    return 2048


@lru_cache(maxsize=1)
def _targets() -> dict[str, Any]:
    targets: dict[str, Any] = read_yaml(data_path("ckpt_templates") / "targets.yaml")
    return targets


@lru_cache(maxsize=1)
def target_classes() -> dict[str, TargetClass]:
    """The known target classes of SGLang, by architecture name."""
    return {
        name: TargetClass.model_validate(group["class"])
        for group in _targets()["families"]
        for name in group["architectures"]
    }


def served_embedding(target: TargetFacts | None, saved_dtype: str) -> dict[str, Any]:
    """What block drafts get of the target's embedding and tied head, for expressions.

    Args:
        target: The target; one that is not known scales nothing.
        saved_dtype: Of the export, for example ``bfloat16``.

    Returns:
        ``embedding_scale`` and its square, 1 for most targets; ``scale_rounds``:
        whether weights times the scale are rounded once more at the saved dtype;
        ``bare_head`` (``TargetClass.bare_tied_head``, and it is tied).
    """
    known = target_classes().get(target.architecture) if target is not None else None
    square: Any = 1
    bare = False
    if target is not None and known is not None:
        if known.scaled_by_root_of is not None:
            # No draft is wider, and a hostile number must not overflow a float.
            square = min(target.text.get(known.scaled_by_root_of, 1), 2**31)
        tied = target.text.get("tie_word_embeddings", True)
        bare = known.bare_tied_head and bool(tied)
    scale = math.sqrt(square)
    power_of_two = math.frexp(scale)[0] == 0.5
    return {
        "embedding_scale": scale,
        "embedding_scale_squared": square,
        "scale_rounds": not power_of_two and saved_dtype != "float32",
        "bare_head": bare,
        "saved_dtype": saved_dtype,
    }


@dataclass
class Captured:
    """Converted layer ids and what they demand.

    Attributes:
        ids: The list for SGLang, or None when it could not be made.
        default: Whether they are SGLang's own default set.
        min_version: Oldest release in which they are captured.
        reason: Why that release.
        findings: What was found.
    """

    ids: list[int] | None
    default: bool = False
    min_version: str = "0"
    reason: str = ""
    findings: list[Finding] = field(default_factory=list)


def capture_ids(
    ids: Sequence[int],
    target: TargetFacts,
    hook: Hook,
    key: str,
    release: Version,
    known: TargetClass | None = None,
    draft: str = "",
) -> Captured:
    """Convert speculators' layer ids into SGLang's for one target.

    Args:
        ids: speculators' ids: ``k`` is the residual after ``k`` layers.
        target: The target that will be served.
        hook: Which of the target's hooks hands the features over.
        key: Config key of the source, the subject of findings.
        release: The requested SGLang release.
        known: The class description; looked up when not given.
        draft: SGLang's class of the draft.

    Returns:
        The converted list, in the order to write it, with findings.
    """
    depth = target.num_hidden_layers
    bad = [k for k in ids if isinstance(k, bool) or not isinstance(k, int)]
    if bad or not ids:
        message = f"{list(ids)!r} is not a list of layer numbers"
        return Captured(None, findings=[error("layer-ids-invalid", key, message)])
    outside = [k for k in ids if not 0 <= k <= depth]
    doubled = sorted({k for k in ids if list(ids).count(k) > 1})
    problems = []
    if outside:
        problems.append(
            error(
                "layer-ids-invalid",
                key,
                f"id {outside[0]} of {list(ids)}: the target has {depth} layers, ids "
                f"go from 0 to {depth}",
                "give the ids that the hidden states were captured with",
            )
        )
    if doubled:
        problems.append(
            error(
                "layer-ids-invalid",
                key,
                f"id {doubled[0]} stands twice in {list(ids)}: SGLang captures each "
                "layer once and fc would get fewer columns",
                "train with --target-layer-ids that differ",
            )
        )
    known = known or target_classes().get(target.architecture)
    if known is None:
        problems.append(
            error(
                "target-unknown-family",
                "architectures",
                f"no capture rule is known for {target.architecture}; the plain one "
                "(id - 1) would be a guess",
                "check that SGLang's class of this target captures the output of "
                "layer k for id k, then --allow target-unknown-family",
            )
        )
        known = TargetClass.model_validate(_targets()["unknown"])
    if outside or doubled:
        return Captured(None, findings=problems)
    if draft in known.rule_not_for:
        known = known.model_copy(update={"rule": "output-of-layer"})
    return _convert(sorted(ids), target, hook, key, release, known, problems)


def _convert(
    ids: list[int],
    target: TargetFacts,
    hook: Hook,
    key: str,
    release: Version,
    known: TargetClass,
    problems: list[Finding],
) -> Captured:
    depth, name = target.num_hidden_layers, target.architecture
    demands: list[tuple[str, str]] = []
    since = known.eagle3 if hook == "eagle3" else known.dflash
    if since is None:
        problems.append(
            error(
                "target-unsupported",
                "architectures",
                f"SGLang's {name} has no {hook} hook in any release up to "
                f"{newest_known()}",
                "serve another target, or another draft family",
            )
        )
    else:
        demands.append((since, f"the {hook} hook of {name}"))
    for value, what, capturable in (
        (0, "the embedding output", known.embedding if hook == "eagle3" else None),
        (depth, "the last layer's output", known.last),
    ):
        if value not in ids:
            continue
        if capturable is None:
            problems.append(
                error(
                    "layer-id-uncapturable",
                    key,
                    f"id {value} of {ids} is {what}, which SGLang's {name} cannot "
                    f"hand over to {hook} drafts"
                    + (f" ({known.note})" if known.note else ""),
                    "train with other --target-layer-ids",
                )
            )
        else:
            demands.append((capturable, f"layer id {value} ({what}) of {name}"))
    converted = [k - 1 for k in ids]
    as_is = _first_not_one(ids)
    if known.rule == "first-is-one" and hook == "eagle3":
        # Since rule_since the list is read as "output of layer" only when it
        # starts with 1; older releases always read it so.
        if converted[0] != 1:
            converted = as_is
            demands.append((known.rule_since or "0", f"these layer ids with {name}"))
            if as_is[0] == 1:
                problems.append(
                    error(
                        "layer-id-uncapturable",
                        key,
                        f"{ids}: SGLang's {name} reads a list that starts with 1 as "
                        "one layer further, and no other spelling exists for it",
                        "train with other --target-layer-ids",
                    )
                )
    elif known.rule == "contains-last" and depth in ids:
        converted = list(ids) if hook == "eagle3" else converted
        demands.append((known.rule_since or "0", f"these layer ids with {name}"))
    elif known.rule == "capture-point":
        converted = list(ids)
    default = sorted({2, depth // 2, depth - 3}) == ids
    minimum = max(demands, key=lambda d: Version(d[0]), default=("0", ""))
    if Version(minimum[0]) > release and since is not None:
        problems.append(
            error(
                "release-too-old",
                key,
                f"{minimum[1]} needs SGLang >= {minimum[0]}, {release} was asked for",
                f"--sglang {minimum[0]} or newer, or other --target-layer-ids",
            )
        )
    return Captured(converted, default, minimum[0], minimum[1], problems)


def _first_not_one(ids: list[int]) -> list[int]:
    """The same ids, ordered so that the first is not 1 (order steers only that)."""
    if ids[0] != 1:
        return list(ids)
    return [*ids[1:2], ids[0], *ids[2:]]
