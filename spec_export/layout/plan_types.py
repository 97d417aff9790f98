"""What a plan consists of: the decided fate of each tensor, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spec_export.findings import Finding, has_errors

Kind = Literal["float", "int64", "bool"]
Counterpart = Literal["embedding", "head", "norm"]
FateName = Literal["renamed", "transformed", "provided_by_target", "dropped"]


@dataclass(frozen=True)
class Placement:
    """One tensor of the export.

    Attributes:
        name: Its name in the export.
        sources: The source tensors it is made of; a target's head that the
            checkpoint lacks has the single source ``target:head``.
        transform: Named transform, or None for a rename.
        arguments: Of the transform.
        shape: Its shape in the export.
        kind: ``float`` follows the dtype rule; integers and booleans never change.
        role_hint: Role known from the rule alone (``buffer``, ``derived``).
        vocab_axis: The axis that counts draft tokens, if one does.
        counterpart: The target tensor it may be a copy of (rows picked through
            the token map when ``vocab_axis`` is set and a map exists).
    """

    name: str
    sources: tuple[str, ...]
    transform: str | None
    shape: tuple[int, ...]
    kind: Kind = "float"
    role_hint: Literal["buffer", "derived"] | None = None
    vocab_axis: int | None = None
    counterpart: Counterpart | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Under which its digest and role are known: its source's where it is one."""
        return f"derived:{self.name}" if self.transform else self.sources[0]


@dataclass(frozen=True)
class Fate:
    """What becomes of one source tensor."""

    source: str
    shape: tuple[int, ...]
    fate: FateName
    to: tuple[str, ...] = ()
    reason: str | None = None
    counterpart: Counterpart | None = None


@dataclass(frozen=True)
class FromTarget:
    """A serving parameter whose value SGLang takes from the target.

    Attributes:
        name: The parameter's checkpoint name.
        shape: Its shape.
        counterpart: Which of the target's tensors.
        source: The source tensor that training used in its place, if the
            source holds one.
    """

    name: str
    shape: tuple[int, ...]
    counterpart: Counterpart
    source: str | None = None


@dataclass(frozen=True)
class ConfigChange:
    """Why a value in config.json is not the one of the source."""

    key: str
    from_: Any
    to: Any
    rule: str


@dataclass
class Plan:
    """How one source becomes one export; pure data, nothing is read or written.

    Attributes:
        template: Name of the template that made it.
        architecture: SGLang class name.
        algorithm: Value of ``--speculative-algorithm``.
        placements: The tensors to write, in order.
        fates: One for each source tensor.
        from_target: Parameters that SGLang fills from the target.
        config: The whole config.json.
        config_changes: What differs from the source's configuration and why.
        launch: Server arguments; ``{draft}`` and ``{target}`` stand for paths.
        notes: Sentences for the deployer.
        min_version: The oldest SGLang release that serves this exactly.
        reasons: Why that release.
        requires_plugin: Whether the serving plug-in has to be installed.
        nonzero: Source tensors that cannot be all zeros.
        vocab: Draft and target vocabulary size; ``map`` names the map tensor.
        findings: What was found on the way.
    """

    template: str
    architecture: str
    algorithm: str
    placements: list[Placement] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    from_target: list[FromTarget] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    config_changes: list[ConfigChange] = field(default_factory=list)
    launch: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    min_version: str = ""
    reasons: list[str] = field(default_factory=list)
    requires_plugin: bool = False
    nonzero: list[str] = field(default_factory=list)
    vocab: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against writing it."""
        return not has_errors(self.findings)
