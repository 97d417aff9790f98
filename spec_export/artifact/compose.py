"""The manifest's content, from plan and facts: what is known before the weights."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from spec_export.artifact import manifest as m
from spec_export.artifact.roles import Facts, saved_dtype
from spec_export.artifact.source import Source
from spec_export.artifact.target import Target
from spec_export.layout.plan_types import Placement, Plan
from spec_export.layout.releases import newest_known
from spec_export.layout.targets import TargetFacts, target_facts
from spec_export.layout.transforms import spelled


def facts_of_target(target: Target | None) -> TargetFacts | None:
    """What the layout has to know of an opened target."""
    if target is None:
        return None
    head: Literal["own", "tied", "packed", "missing"] = "missing"
    if target.has_weights and target.find("head") is not None:
        head = "tied" if target.head_is_tied else "own"
        if target.packed("head"):
            head = "packed"
    return target_facts(target.config, head)


def saved_as(source: Source, placement: Placement, dtype: str) -> str:
    """The dtype of a tensor in the export."""
    name = placement.key
    if placement.transform is not None or name.startswith("target:"):
        return dtype
    return saved_dtype(source.tensors[name], placement.kind, dtype)


def compose(
    source: Source,
    target: Target | None,
    plan: Plan,
    facts: Facts,
    dtype: str,
) -> m.Manifest:
    """The manifest of an export that is about to be written.

    Args:
        source: The draft.
        target: Its target, or None.
        plan: How it is laid out.
        facts: What its values tell.
        dtype: Saved float dtype in safetensors' spelling.

    Returns:
        Everything but files, comparison, deviations and findings.
    """
    record = source.record
    tensors = {}
    for placement in plan.placements:
        name = placement.key
        tensors[placement.name] = m.TensorEntry(
            role=facts.roles.get(name),  # type: ignore[arg-type]
            source=list(placement.sources),
            transform=(
                spelled(placement.transform, placement.arguments)
                if placement.transform is not None
                else None
            ),
            declared_trainable=_any_of(record.requires_grad, placement),
            in_optimizer=_any_of(record.in_optimizer, placement),
            changed_in_training=_any_of(record.changed, placement),
            equals_target=facts.equals.get(name),
            vocab_axis=placement.vocab_axis,
            dtype=saved_as(source, placement, dtype),
            shape=list(placement.shape),
            sha256=facts.sha256[name],
        )
    provided = [
        m.Provided(
            name=p.name,
            shape=list(p.shape),
            dtype=dtype,
            sha256=facts.sha256.get(p.source or ""),
            role=facts.roles.get(p.source or "", "frozen"),  # type: ignore[arg-type]
            counterpart=p.counterpart,
        )
        for p in plan.from_target
    ]
    return m.Manifest(
        run_id=record.run_id or uuid.uuid4().hex,
        status="saved",
        serving=m.Serving(
            min_version=plan.min_version,
            reasons=plan.reasons,
            max_known_version=newest_known(),
            algorithm=plan.algorithm,
            architecture=plan.architecture,
            requires_plugin=plan.requires_plugin,
            launch=plan.launch,
            notes=plan.notes,
        ),
        target_model=_target_model(target),
        tensors=tensors,
        provided_by_target=provided,
        dropped=[
            m.Dropped(name=f.source, shape=list(f.shape), reason=f.reason or "")
            for f in plan.fates
            if f.fate == "dropped"
        ],
        config_changes=[
            m.ConfigChangeEntry(key=c.key, to=c.to, rule=c.rule, **{"from": c.from_})
            for c in plan.config_changes
        ],
        vocab=m.Vocab(
            draft_size=plan.vocab.get("draft_size"),
            target_size=plan.vocab.get("target_size"),
            encoding="offset" if "d2t" in source.tensors else None,
            digests={n: facts.sha256[n] for n in ("d2t", "t2d") if n in facts.sha256},
        ),
        training=m.Training(
            speculators_version=record.speculators_version,
            global_step=record.global_step,
            epoch=record.epoch,
            metrics=record.metrics,
            recipe=record.recipe,
            recipe_digest=record.recipe_digest,
            packages={**record.packages, "spec-export": own_version()},
        ),
    )


def _any_of(known: Mapping[str, bool] | None, placement: Placement) -> bool | None:
    """A fact of the tensors that one was made of; None where none is known."""
    facts = (
        [known[name] for name in placement.sources if name in known] if known else []
    )
    return any(facts) if facts else None


def _target_model(target: Target | None) -> m.TargetModel:
    if target is None:
        return m.TargetModel()
    known = facts_of_target(target)
    assert known is not None
    digests = m.TargetDigests()
    if target.has_weights:
        digests = m.TargetDigests(
            embedding=target.digest("embedding"),
            head=target.digest("head"),
            norm=target.digest("norm"),
        )
    return m.TargetModel(
        name=target.name,
        revision=target.revision,
        architectures=target.architectures,
        num_hidden_layers=known.num_hidden_layers,
        hidden_size=known.hidden_size,
        vocab_size=known.vocab_size,
        head=None if known.head == "missing" else known.head,
        digests=digests,
    )


def own_version() -> str:
    """The installed release of spec-export."""
    try:
        return version("spec-export")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0.0.0"
