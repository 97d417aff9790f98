"""Roles by value: what was trained, what is a frozen copy.

``requires_grad`` is not asked: it says what was intended. A tensor that equals the
target's is a copy whatever it says, one that moved since the first step is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from spec_export.artifact.dtypes import cast_blocks, cast_error
from spec_export.artifact.source import Source
from spec_export.artifact.target import Target
from spec_export.artifact.transforms import transformed_blocks
from spec_export.artifact.values import (
    check_values,
    check_vocab_map,
    equals_target,
    scan,
    target_ids,
)
from spec_export.findings import Finding, error, has_errors, info, warning
from spec_export.layout.plan_types import Counterpart, Kind, Placement, Plan
from spec_export.layout.tensors import TensorInfo


@dataclass
class Facts:
    """What one look at all values tells.

    Attributes:
        sha256: Digest of each source tensor's bytes at the saved dtype, by source
            name; a tensor taken from the target has the name ``target:head``.
        equals: Whether it is bit-equal to the target's counterpart; None where
            there is no counterpart or no target weights.
        roles: ``trained``, ``frozen``, ``derived``, ``buffer`` or None.
        findings: Impossible values and contradictions.
    """

    sha256: dict[str, str] = field(default_factory=dict)
    equals: dict[str, bool | None] = field(default_factory=dict)
    roles: dict[str, str | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class _Look:
    """What one look at the values of a tensor tells, whatever else is known."""

    sha256: str
    equals: bool | None
    findings: tuple[Finding, ...]
    rounding: float | None = None  # the largest error, where the format changes


class Known:
    """Looks of a run's earlier exports, so that frozen tensors are read once.

    Only for exports of one training with the same options and the same target.
    """

    def __init__(self) -> None:
        self._looks: dict[str, tuple[int, _Look]] = {}
        self._versions: Mapping[str, int] = {}

    def start(self, versions: Mapping[str, int]) -> None:
        """Begin with the next export.

        Args:
            versions: For each tensor a number that is that of the last export if
                its bytes are.
        """
        self._versions = versions

    def get(self, name: str, look: Callable[[], _Look]) -> _Look:
        """What is known of a tensor, after a look at it if need be."""
        version, known = self._versions.get(name), self._looks.get(name)
        if known is not None and version is not None and known[0] == version:
            return known[1]
        found = look()
        if version is not None:
            self._looks[name] = version, found
        return found


def saved_dtype(info: TensorInfo, kind: Kind, dtype: str) -> str:
    """The dtype of a tensor in the export: integers and booleans never change.

    Args:
        info: The source tensor.
        kind: What its rule says; token maps are I64 in every export.
        dtype: Saved float dtype.
    """
    if kind == "float":
        return dtype
    return "I64" if kind == "int64" else info.dtype


def saved_blocks(array: np.ndarray, kind: Kind, dtype: str) -> Iterator[np.ndarray]:
    """A source tensor as it is saved, in flat blocks."""
    for block in cast_blocks(array, dtype):
        yield block.astype(np.int64, copy=False) if kind == "int64" else block


def derived_blocks(
    source: Source, placement: Placement, dtype: str
) -> Iterator[np.ndarray]:
    """A tensor that a named transform computes, as it is saved, in flat blocks."""
    assert placement.transform is not None
    return transformed_blocks(
        placement.transform,
        [source.read(name) for name in placement.sources],
        placement.arguments,
        placement.shape,
        dtype,
    )


def read_facts(
    source: Source,
    plan: Plan,
    target: Target | None,
    dtype: str,
    known: Known | None = None,
) -> Facts:
    """Look at every value once: digests, impossible numbers, roles.

    Args:
        source: The draft.
        plan: A plan without errors.
        target: With weights, or None.
        dtype: Saved float dtype in safetensors' spelling.
        known: What earlier exports of the run saw, and where this one is noted.

    Returns:
        The facts; error findings in them speak against writing.
    """
    facts, known = Facts(), known or Known()
    cast: dict[str, dict[str, float]] = {}
    weights = target if target is not None and target.has_weights else None
    rows = _check_map(source, plan, facts)
    counterparts = {f.source: f.counterpart for f in plan.fates}
    renamed = [p for p in plan.placements if p.transform is None]
    counterparts |= {p.sources[0]: p.counterpart for p in renamed}
    kinds = {s: p.kind for p in plan.placements for s in p.sources}
    kinds |= {p.sources[0]: p.kind for p in renamed}
    hints = {p.sources[0]: p.role_hint for p in renamed}
    for fate in plan.fates:
        name = fate.source

        def look(name: str = name) -> _Look:
            return _look(
                source,
                name,
                kinds.get(name),
                counterparts.get(name),
                weights,
                rows,
                dtype,
                may_be_zero=name not in plan.nonzero,
            )

        seen = known.get(name, look)
        facts.sha256[name] = seen.sha256
        facts.findings += seen.findings
        if has_errors(seen.findings):
            continue
        if seen.rounding is not None:
            cast.setdefault(source.tensors[name].dtype, {})[name] = seen.rounding
        facts.equals[name] = seen.equals
        facts.roles[name] = _role(source, name, seen.equals, hints.get(name))
        _doubt(source, name, facts)
    for placement in plan.placements:
        if placement.transform is not None:
            facts.roles[placement.key] = "derived"
            scanned = scan(derived_blocks(source, placement, dtype))
            facts.sha256[placement.key] = scanned.sha256
            if not has_errors(facts.findings):
                result = TensorInfo(placement.name, dtype, placement.shape)
                facts.findings += check_values(result, scanned, may_be_zero=True)
        elif placement.key.startswith("target:") and weights is not None:
            _take_from_target(placement.key, weights, rows, dtype, facts)
    _replaced(source, plan, facts)
    facts.findings += [_cast_info(old, dtype, cast[old]) for old in sorted(cast)]
    return facts


def _look(
    source: Source,
    name: str,
    kind: Kind | None,
    counterpart: Counterpart | None,
    target: Target | None,
    rows: np.ndarray | None,
    dtype: str,
    *,
    may_be_zero: bool,
) -> _Look:
    """Digest, bad values, equality with the target; kind None is not written."""
    tensor = source.tensors[name]
    scanned = scan(saved_blocks(source.read(name), kind or "float", dtype))
    rounding, problems = None, list[Finding]()
    if kind == "float" and tensor.is_float and tensor.dtype != dtype:
        rounding, problems = _cast(source, tensor, dtype)
    if not has_errors(problems):
        problems += check_values(tensor, scanned, may_be_zero=may_be_zero)
    if has_errors(problems):
        return _Look(scanned.sha256, None, tuple(problems))
    # Rows are picked through the token map where the tensor counts draft tokens.
    through_map = tensor.shape[:1] != _rows_of(target, counterpart)
    equals = _equals(
        source, name, counterpart, target, rows if through_map else None, dtype
    )
    return _Look(scanned.sha256, equals, tuple(problems), rounding)


def _cast(
    source: Source, tensor: TensorInfo, dtype: str
) -> tuple[float, list[Finding]]:
    """What rounding a tensor to the saved format costs, and whether it can be."""
    worst, lost = cast_error(source.read(tensor.name), dtype)
    if lost is not None:
        at = ", ".join(str(int(i)) for i in np.unravel_index(lost, tensor.shape))
        return worst, [
            error(
                "non-finite",
                tensor.name,
                f"the {tensor.dtype} value at [{at}] is beyond the range of {dtype}",
                "--dtype bfloat16 or --dtype float32",
            )
        ]
    return worst, []


def _cast_info(old: str, new: str, rounding: Mapping[str, float]) -> Finding:
    """One line for all tensors that change from one format to another."""
    worst = max(rounding, key=lambda name: rounding[name])
    cost = "no value changes"
    if rounding[worst]:
        cost = f"the largest rounding error is {rounding[worst]:.3g}, in {worst}"
    message = f"{old} in the source and {new} in the export: {len(rounding)}"
    message += f" tensor{'s' * (len(rounding) > 1)}; {cost}"
    return info("dtype-cast", "dtype", message, "--dtype chooses another format")


def _check_map(source: Source, plan: Plan, facts: Facts) -> np.ndarray | None:
    """The target's row of each draft row, None for a whole vocabulary."""
    if "d2t" not in source.tensors:
        return None
    d2t = source.read("d2t")
    t2d = source.read("t2d") if "t2d" in source.tensors else None
    head = source.tensors.get("lm_head.weight")
    problems = check_vocab_map(
        d2t, t2d, plan.vocab.get("target_size"), None if head is None else head.shape[0]
    )
    facts.findings += problems
    fatal = [
        f for f in problems if f.code == "vocab-map-invalid" and f.subject == "d2t"
    ]
    return None if fatal else target_ids(d2t)


def _rows_of(target: Target | None, role: Counterpart | None) -> tuple[int, ...]:
    found = None if target is None or role is None else target.find(role)
    return () if found is None else found.shape[:1]


def _equals(
    source: Source,
    name: str,
    role: Counterpart | None,
    target: Target | None,
    rows: np.ndarray | None,
    dtype: str,
) -> bool | None:
    if role is None or target is None:
        return None
    theirs = target.find(role)
    if theirs is None or target.packed(role):
        return None
    return equals_target(source.read(name), target, role, rows, dtype)


def _role(
    source: Source, name: str, equals: bool | None, hint: str | None
) -> str | None:
    if hint is not None:
        return hint
    if equals:
        return "frozen"
    changed = source.record.changed
    if changed is not None:
        return "trained" if changed.get(name, False) else "frozen"
    return "trained" if equals is False else None


def _doubt(source: Source, name: str, facts: Facts) -> None:
    """A tensor in an optimizer that neither moved nor is a copy is suspicious."""
    record = source.record
    if (
        facts.roles.get(name) == "frozen"
        and not facts.equals.get(name)
        and (record.in_optimizer or {}).get(name)
        and (record.requires_grad or {}).get(name)
    ):
        facts.findings.append(
            warning(
                "optimizer-no-change",
                name,
                "is in an optimizer and has not moved since the first step",
                "look whether it gets a gradient",
            )
        )


def _take_from_target(
    name: str, target: Target, rows: np.ndarray | None, dtype: str, facts: Facts
) -> None:
    """A head that a slim checkpoint left out: the target's rows, cast."""
    blocks = (
        block
        for piece in target.iter_rows("head", rows)
        for block in cast_blocks(piece, dtype)
    )
    scanned = scan(blocks)
    found = target.find("head")
    shape = () if found is None else found.shape
    facts.sha256[name] = scanned.sha256
    facts.equals[name], facts.roles[name] = True, "frozen"
    facts.findings += check_values(TensorInfo("lm_head.weight", dtype, shape), scanned)


def _replaced(source: Source, plan: Plan, facts: Facts) -> None:
    """A trained tensor that SGLang would replace by the target's is an error.

    On disk, "differs from the target's" may also mean "this is another target":
    when the shipped head is the target's own, the target is the right one and the
    embedding was trained; when both differ, the target is doubted.
    """
    for fate in plan.fates:
        name = fate.source
        if fate.fate != "provided_by_target" or facts.equals.get(name) is not False:
            continue
        others = [
            facts.equals[p.key]
            for p in plan.placements
            if p.counterpart is not None and facts.equals.get(p.key) is not None
        ]
        changed = (source.record.changed or {}).get(name)
        trained = changed if changed is not None else bool(others) and all(others)
        if trained:
            facts.roles[name] = "trained"
            code = "trained-head" if fate.counterpart == "head" else "trained-embedding"
            facts.findings.append(
                error(
                    code,
                    name,
                    f"was trained: it differs from the target's {fate.counterpart}; "
                    f"{fate.reason}",
                    "train with it frozen; nothing in stock SGLang keeps it",
                )
            )
        else:
            facts.roles[name] = "frozen" if changed is False else None
            facts.findings.append(
                error(
                    "target-differs",
                    name,
                    f"is not the target's {fate.counterpart} (SHA-256 at the saved "
                    f"dtype {facts.sha256[name][:12]}...): the draft was trained with "
                    "another target",
                    "give the target of the training with --target DIR; if it is a "
                    "fine-tuned or quantised one of the same shape, --allow "
                    "target-differs",
                )
            )
