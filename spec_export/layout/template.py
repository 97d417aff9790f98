"""One template file as checked data: how a draft family becomes one SGLang class.

The file format is described for authors in ``ckpt_templates/README.md``; the
models below are its grammar; ``proof.prove`` is the test that each file has to
pass before it is used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from spec_export.layout.expressions import evaluate
from spec_export.layout.plan_types import Counterpart, Kind

Expr = str | int | bool
PLACEHOLDER = re.compile(r"\{([a-z]+)\}")


class TemplateError(ValueError):
    """A template that does not prove."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Older(_Strict):
    """What releases of speculators before one did, which had no key for it.

    Asked where the key is absent and config.json has such a ``speculators_version``.
    """

    before: str
    value: str | int | bool


class Variable(_Strict):
    """A name for expressions, read from the source's (or target's) configuration.

    Exactly one of ``source``, ``target``, ``record`` and ``expr`` says where the
    value is. ``absent`` is the value when the key is missing or null; without it
    a missing key is an error with the code ``missing``. ``record`` is where the
    recorded recipe says what a configuration forgot, ``older`` what it need not say.
    ``of: items`` makes a list of one value. ``of: state`` is ``absent``, ``null`` or
    ``value``, for readers that treat the first two differently.
    """

    source: str | None = None
    target: str | None = None
    expr: Expr | None = None
    record: str | None = None
    older: Older | None = None
    type: Literal["int", "bool", "str", "float", "list"] = "int"
    of: Literal["value", "count", "items", "present", "state"] = "value"
    equal: str | None = None
    absent: Expr | None = None
    missing: str = "config-invalid"
    min: int = 0
    max: int = 2**31 - 1
    samples: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = [o for o in (self.source, self.target, self.expr) if o is not None]
        if len(origins) != 1:
            raise ValueError("a variable has exactly one of source, target, expr")
        return self

    @property
    def origin(self) -> str:
        """Where the value is, in words for a message."""
        if self.target is not None:
            return f"{self.target} of the target"
        return self.source or str(self.expr)


class NameChoice(_Strict):
    """A spelling that holds under a condition; the first that holds is taken."""

    is_: str = Field(alias="is")
    when: Expr = True


class Deviation(_Strict):
    """What a user has to allow by name before the tensor may be dropped."""

    code: str
    hint: str


class TensorRule(_Strict):
    """What becomes of the source tensors of one name pattern."""

    source: str
    each: dict[str, Expr] = Field(default_factory=dict)
    exists: Expr = True
    flag: str | None = None
    optional: bool = False
    shape: list[Expr] | None = None
    kind: Kind = "float"
    export: list[NameChoice] = Field(default_factory=list)
    invertible: bool = True
    fate: Literal["renamed", "transformed", "provided_by_target", "dropped"] = "renamed"
    reason: str | None = None
    deviation: Deviation | None = None
    counterpart: Counterpart | None = None
    vocab_axis: int | None = None
    role: Literal["buffer", "derived"] | None = None
    fill: Counterpart | None = None
    nonzero: bool = False

    @field_validator("export", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [{"is": value}] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fate_fits(self) -> Self:
        if (self.fate == "renamed") != bool(self.export):
            raise ValueError(f"{self.source}: only what is written has an export name")
        if self.fate in ("provided_by_target", "dropped") and not self.reason:
            raise ValueError(f"{self.source}: {self.fate} needs a reason")
        if self.fate == "provided_by_target" and self.counterpart is None:
            raise ValueError(f"{self.source}: say which of the target's tensors")
        if not self.invertible and not self.reason:
            raise ValueError(f"{self.source}: say why the rule is not invertible")
        return self


class Derived(_Strict):
    """A tensor of the export that a named transform computes.

    While ``when`` holds it takes the place of a renamed tensor of the same name.
    """

    name: str
    each: dict[str, Expr] = Field(default_factory=dict)
    when: Expr = True
    transform: str
    sources: list[str] = Field(default_factory=list)
    arguments: dict[str, Expr] = Field(default_factory=dict)
    shape: list[Expr]


class Parameter(_Strict):
    """A parameter of the SGLang class, by the name that its loader takes.

    ``since`` is the first release of the class that has it, where that is not the
    first release of all.
    """

    name: str
    since: str | None = None
    each: dict[str, Expr] = Field(default_factory=dict)
    exists: Expr = True
    shape: list[Expr]
    origin: Literal["export", "target"] = "export"
    counterpart: Counterpart | None = None
    reason: str | None = None


class ConfigRule(_Strict):
    """How one key of config.json gets its value: exactly one of the four ways."""

    key: str
    value: Any = None
    expr: Expr | None = None
    copy_: str | None = Field(default=None, alias="copy")
    function: Literal["rope", "dtype", "target"] | None = None
    when: Expr = True
    rule: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [w is not None for w in (self.expr, self.copy_, self.function)]
        if sum(ways) + ("value" in self.model_fields_set) != 1:
            raise ValueError(f"{self.key}: one of value, expr, copy, function")
        return self


class Refusal(_Strict):
    """A condition under which SGLang would not compute what was trained."""

    when: Expr
    code: str
    subject: str
    message: str
    hint: str
    severity: Literal["error", "warning", "info"] = "error"


class Feature(_Strict):
    """Something that only exists from a release on."""

    name: str
    when: Expr
    since: str
    subject: str
    why: str


class Flag(_Strict):
    """A server argument that this draft needs, and what the deployer is told."""

    when: Expr
    argv: list[str]
    before: str | None = None
    since: str | None = None
    code: str | None = None
    subject: str | None = None
    message: str | None = None
    note: str | None = None


class Capture(_Strict):
    """Which auxiliary hidden states the target has to hand over."""

    ids: str
    hook: Literal["eagle3", "dflash"]


class Spelling(_Strict):
    """A beginning of tensor names that SGLang's loader takes.

    ``prefix`` may stand before every name, but not before those that begin as in
    ``not_before``; ``begin`` is replaced by ``means`` before the name is looked up.
    """

    prefix: str | None = None
    not_before: list[str] = Field(default_factory=list)
    begin: str | None = None
    means: str | None = None
    since: str


class LoaderParameter(_Strict):
    """A parameter that only some configurations have, or that is no weight.

    Attributes:
        name: With layers called ``layers.{i}``.
        origin: ``export``: a tensor has to set it; ``target``: SGLang replaces it;
            ``optional``: a tensor may set it; ``unread``: it exists and the
            forward does not use it; ``absent``: the template's parameter of this
            name does not exist.
        reason: What the deployer is told about an unread one.
    """

    name: str
    each: dict[str, Expr] = Field(default_factory=dict)
    exists: Expr = True
    shape: list[Expr] = Field(default_factory=list)
    origin: Literal["export", "target", "optional", "unread", "absent"] = "export"
    reason: str | None = None


class Bundle(_Strict):
    """A tensor with one dimension more that holds parameters of its neighbours.

    ``name`` is an ending, ``parts`` are endings of the parameters that it sets.
    """

    name: str
    each: dict[str, Expr]
    parts: list[str]
    shape: list[Expr]


class Loader(_Strict):
    """How SGLang reads a folder of this class: for folders that we did not write.

    Attributes:
        variables: The same names as the template's, read from config.json.
        spellings: Which beginnings of names load, and since when.
        only: A word; names without it are another model's and are not read.
        unknown: What becomes of a name that no parameter takes: ``dropped`` without
            a word, or ``refused``, since SGLang raises.
        fused: Tensors that hold several parameters one above the other.
        bundles: Tensors that hold the parameters of all experts.
        contain: A word anywhere in a name -> the one parameter that it then sets.
        ignored: Words of names that the loader skips on purpose.
        parameters: Besides, and instead of, those of the template.
        features: What only folders that we did not write may ask for.
        refuse: Configurations that do not compute what their tensors say.
    """

    variables: dict[str, Variable]
    spellings: list[Spelling] = Field(default_factory=list)
    only: str | None = None
    unknown: Literal["dropped", "refused"] = "dropped"
    fused: dict[str, list[str]] = Field(default_factory=dict)
    bundles: list[Bundle] = Field(default_factory=list)
    contain: dict[str, str] = Field(default_factory=dict)
    ignored: list[str] = Field(default_factory=list)
    parameters: list[LoaderParameter] = Field(default_factory=list)
    features: list[Feature] = Field(default_factory=list)
    refuse: list[Refusal] = Field(default_factory=list)


class Serves(_Strict):
    """The SGLang side: class, algorithm and since when.

    ``layers`` are the decoder types that the class takes, where they decide between
    classes. ``replaces`` are the target classes in whose place SGLang puts this one
    when it reads a folder for a draft: such a folder names its target's class.
    """

    architecture: str
    algorithm: str
    since: str
    plugin: bool = False
    layers: list[str] | None = None
    replaces: list[str] = Field(default_factory=list)
    launch: list[str]


class Template(_Strict):
    """A whole template file."""

    template: str
    speculators_type: str
    serves: Serves
    variables: dict[str, Variable]
    names: dict[str, list[NameChoice]] = Field(default_factory=dict)
    capture: Capture | None = None
    tensors: list[TensorRule]
    derived: list[Derived] = Field(default_factory=list)
    parameters: list[Parameter]
    config: list[ConfigRule]
    ignored_config: list[str] = Field(default_factory=list)
    refuse: list[Refusal] = Field(default_factory=list)
    features: list[Feature] = Field(default_factory=list)
    flags: list[Flag] = Field(default_factory=list)
    loader: Loader | None = None

    def spell(self, pattern: str, values: Mapping[str, Any]) -> str:
        """Fill the placeholders of a name pattern.

        Args:
            pattern: For example ``{layer}.hidden_norm.weight``.
            values: Indices and variables.

        Returns:
            The concrete name.
        """

        def fill(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in self.names:
                return self.spell(choose(self.names[name], values), values)
            return str(values[name])

        return PLACEHOLDER.sub(fill, pattern)


def choose(choices: list[NameChoice], values: Mapping[str, Any]) -> str:
    """The first spelling whose condition holds."""
    for choice in choices:
        if evaluate(choice.when, values):
            return choice.is_
    raise TemplateError(f"no spelling of {choices[0].is_} holds")


def indices(
    each: Mapping[str, Expr], values: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """All index assignments of a rule, merged with the variables."""
    for combination in itertools.product(*(span(e, values) for e in each.values())):
        yield {**values, **dict(zip(each, combination, strict=True))}


def span(each: Expr, values: Mapping[str, Any]) -> Sequence[Any]:
    """What an index runs over: ``0 .. n - 1`` for a number, else a list's items."""
    found = evaluate(each, values)
    return found if isinstance(found, list) else range(int(found))


@lru_cache(maxsize=1024)
def pattern_regex(pattern: str) -> re.Pattern[str]:
    """A source pattern as an expression with one group per index."""
    parts = PLACEHOLDER.split(pattern)
    out = [
        f"(?P<{part}>[A-Za-z0-9]+)" if i % 2 else re.escape(part)
        for i, part in enumerate(parts)
    ]
    return re.compile("".join(out))
