"""The ``callbacks:`` block of a speculators recipe, read as data.

The block stands beside ``train:``, where speculators ignores it silently; inside
``train:`` speculators would warn and ignore it, so that is an error here. Nothing
of torch or speculators is imported.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails

from spec_export.findings import (
    Finding,
    SpecExportError,
    check_allow,
    error,
    usage_error,
)
from spec_export.layout.releases import parse_release

ENTRY_POINT_GROUP = "spec_export.callbacks"
OWN_CALLBACK = "spec_export.SGLangExport"
# Both spellings name the same class; a recipe may use either.
_OWN_PATHS = frozenset({OWN_CALLBACK, "spec_export.training.callback.SGLangExport"})
_SIZE = re.compile(r"[1-9][0-9]*(\.[0-9]+)? ?([KMGT]i?B|B)?", re.IGNORECASE)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EverySteps(_Strict):
    """Export after every ``steps`` optimizer steps."""

    steps: int = Field(gt=0, strict=True)


class CompareConfig(_Strict):
    """When and how much the forward comparison compares.

    Attributes:
        on: At each export in training, in ``finalize`` only, or never.
        positions: Tokens to compare.
        steps: Chained draft steps.
        max_seconds: Fewer positions are taken when it would last longer.
    """

    on: Literal["checkpoint", "finalize", "never"] = "checkpoint"
    positions: int = Field(default=256, gt=0, strict=True)
    steps: int = Field(default=3, gt=0, strict=True)
    max_seconds: float = Field(default=10, gt=0)


def _yaml_on(value: Any) -> Any:
    """YAML 1.1 reads the bare key ``on`` as true; give it its name back."""
    if isinstance(value, Mapping) and True in value and "on" not in value:
        return {"on" if key is True else key: item for key, item in value.items()}
    return value


class CallbackConfig(_Strict):
    """``init_args`` of ``spec_export.SGLangExport``.

    Attributes:
        output_dir: Exports go to ``step-<global step>`` folders in it.
        every: ``checkpoint`` (each save of the trainer), ``best``, or a number
            of steps.
        keep_last: How many exports to keep; None keeps all.
        sglang: The oldest SGLang release that the deployers run.
        plugin: Whether to write for our serving plug-in.
        dtype: Float format of the weights; None is bfloat16 for a live run.
        max_shard_size: Bytes, or a number with a unit; None is 5GB.
        compare: The forward comparison.
        allow: Deviation codes that are accepted by name.
        on_error: Whether a failed export ends the training.
        background: Whether writing may go on while training does.
        when_busy: What to do when an export is due and the one before it is still
            being written: ``skip`` it and say so, or ``wait``. None skips one of
            ``every: {steps: N}`` and waits with those of a save.
    """

    output_dir: Path
    every: Literal["checkpoint", "best"] | EverySteps = "checkpoint"
    keep_last: int | None = Field(default=None, ge=1, strict=True)
    sglang: str | None = None
    plugin: Literal["auto", "never", "always"] = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    max_shard_size: int | str | None = None
    compare: Annotated[CompareConfig, BeforeValidator(_yaml_on)] = CompareConfig()
    allow: tuple[str, ...] = ()
    on_error: Literal["warn", "raise"] = "warn"
    background: bool = True
    when_busy: Literal["skip", "wait"] | None = None

    @field_validator("max_shard_size")
    @classmethod
    def _is_size(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and not _SIZE.fullmatch(value.strip()):
            raise ValueError("is not a size; write for example 5GB or 500MiB")
        if isinstance(value, int) and value <= 0:
            raise ValueError("is not a size in bytes")
        return value

    @field_validator("output_dir")
    @classmethod
    def _is_named(cls, value: Path) -> Path:
        if value == Path():  # pydantic reads "" as "."
            raise ValueError("must name a folder")
        return value


@dataclass(frozen=True)
class CallbackEntry:
    """One entry of ``callbacks:``.

    Attributes:
        class_path: As written in the recipe.
        init_args: As written in the recipe.
        where: Dotted place of these.
        config: The validated arguments if it is our exporter.
        entry_point: Where to load it from if it is somebody else's.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    where: str = "init_args"
    config: CallbackConfig | None = None
    entry_point: EntryPoint | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe file.

    Attributes:
        path: The file.
        train: The ``train:`` block, or the whole file where there is none
            (speculators accepts both).
        callbacks: The entries of ``callbacks:``; empty if there are none.
    """

    path: Path
    train: dict[str, Any]
    callbacks: tuple[CallbackEntry, ...]

    @property
    def exporters(self) -> list[CallbackEntry]:
        """Those of our exporters."""
        return [entry for entry in self.callbacks if entry.config is not None]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe and validate its callbacks.

    Raises:
        SpecExportError: exit 2: ``path-missing``, ``recipe-invalid``,
            ``callbacks-misplaced``, ``callback-unknown``, ``callback-argument``.
    """
    try:
        data = path.read_bytes()
        content = yaml.safe_load(data)
    except OSError as problem:
        raise usage_error(
            "path-missing", path.name, f"{path} cannot be read: {problem.strerror}"
        ) from problem
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as problem:
        why = " ".join(str(problem).split()) or type(problem).__name__
        raise usage_error(
            "recipe-invalid", path.name, f"it is no YAML: {why}"
        ) from problem
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise usage_error(
            "recipe-invalid",
            path.name,
            f"it holds a {type(content).__name__}, not a mapping",
            "put the flags of speculators train under 'train:'",
        )
    train = content.get("train")
    if isinstance(train, dict):
        _refuse_misplaced(train, "train.callbacks")
        block = content.get("callbacks")
    else:
        # Without `train:` speculators takes the whole file as its own flags.
        _refuse_misplaced(content, "callbacks")
        train, block = content, None
    return Recipe(path, train, parse_callbacks(block))


def config_path(argv: Sequence[str]) -> Path | None:
    """The recipe among the arguments of ``speculators train``, None without one."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", type=Path)
    found, _ = parser.parse_known_args(list(argv))
    return found.config


def _refuse_misplaced(block: Mapping[str, Any], where: str) -> None:
    places = [where] if "callbacks" in block else []
    places += [
        f"{where.removesuffix('callbacks')}{name}.callbacks"
        for name, value in block.items()
        if isinstance(value, dict) and "callbacks" in value
    ]
    if places:
        raise SpecExportError(
            [
                error(
                    "callbacks-misplaced",
                    place,
                    "speculators takes this block for one of its own flags",
                    "move 'callbacks:' to the top level of the file, beside 'train:'",
                )
                for place in places
            ],
            exit_code=2,
        )


def parse_callbacks(block: Any) -> tuple[CallbackEntry, ...]:
    """Validate the content of ``callbacks:``; None is an empty list.

    Raises:
        SpecExportError: exit 2, with a finding for each entry that is wrong.
    """
    if block is None:
        return ()
    if not isinstance(block, list):
        raise usage_error(
            "recipe-invalid",
            "callbacks",
            f"it is a {type(block).__name__}, not a list",
            "begin each callback with '- class_path: ...'",
        )
    entries: list[CallbackEntry] = []
    findings = []
    for index, item in enumerate(block):
        try:
            entries.append(_parse_entry(item, f"callbacks[{index}]"))
        except SpecExportError as problem:
            findings += problem.findings
    if findings:
        raise SpecExportError(findings, exit_code=2)
    require_apart((e.where, e.config.output_dir) for e in entries if e.config)
    return tuple(entries)


def require_apart(folders: Iterable[tuple[str, Path]]) -> None:
    """Refuse two exporters of one training into one folder.

    They would share the memory of the run: after a resume each would take the other's
    exports for its own, and remove them.

    Args:
        folders: Where each exporter is written down, and its output_dir.

    Raises:
        SpecExportError: exit 2 ``callback-argument``.
    """
    known: dict[Path, str] = {}
    for where, output_dir in folders:
        folder = output_dir.resolve()
        if folder in known:
            raise usage_error(
                "callback-argument",
                f"{where}.output_dir",
                f"{output_dir} is that of {known[folder]} too",
                "give each callback a folder of its own",
            )
        known[folder] = where


def _parse_entry(item: Any, where: str) -> CallbackEntry:
    if isinstance(item, str):
        item = {"class_path": item}
    if not isinstance(item, dict) or not isinstance(item.get("class_path"), str):
        raise usage_error(
            "recipe-invalid",
            where,
            "it has no class_path",
            f"write '- class_path: {OWN_CALLBACK}'",
        )
    unknown = sorted(str(key) for key in item.keys() - {"class_path", "init_args"})
    if unknown:
        raise usage_error(
            "recipe-invalid",
            f"{where}.{unknown[0]}",
            "an entry has class_path and init_args only",
            "put arguments of the callback under 'init_args:'",
        )
    init_args, place = item.get("init_args"), f"{where}.init_args"
    if init_args is None:
        init_args = {}
    if not isinstance(init_args, dict):
        raise usage_error("recipe-invalid", place, "it is not a mapping")
    class_path = item["class_path"]
    if class_path in _OWN_PATHS:
        config = parse_init_args(init_args, place)
        return CallbackEntry(class_path, init_args, place, config)
    point = _entry_point(class_path, where)
    return CallbackEntry(class_path, init_args, place, entry_point=point)


def _entry_point(class_path: str, where: str) -> EntryPoint:
    """Find an installed callback by its entry point's name or its class path."""
    installed = list(entry_points(group=ENTRY_POINT_GROUP))
    for point in installed:
        if class_path in (point.name, point.value, point.value.replace(":", ".")):
            return point
    known = [OWN_CALLBACK, *sorted(point.name for point in installed)]
    raise usage_error(
        "callback-unknown",
        where,
        f"{class_path} is not imported: a recipe is data, and only our own class "
        f"paths and entry points of the group {ENTRY_POINT_GROUP} are loaded",
        f"known: {', '.join(known)}",
    )


def parse_init_args(
    init_args: Mapping[str, Any], where: str = "init_args"
) -> CallbackConfig:
    """Validate the arguments of ``SGLangExport``.

    Args:
        init_args: As in the recipe or as keyword arguments.
        where: Dotted place that the findings begin with.

    Raises:
        SpecExportError: exit 2, one ``callback-argument`` per wrong field, or
            ``option-invalid`` for a code that cannot be allowed and a release that
            is none.
    """
    try:
        config = CallbackConfig.model_validate(dict(init_args))
    except ValidationError as problem:
        findings: dict[str, Finding] = {}
        for one in problem.errors():
            # `every` may be a word or a mapping; pydantic reports each attempt.
            location = [str(part) for part in one["loc"]]
            if location[0] == "every":
                location, one["input"] = ["every"], init_args["every"]
            subject = ".".join([where, *location])
            findings.setdefault(subject, _argument_finding(subject, location, one))
        raise SpecExportError(findings.values(), exit_code=2) from None
    with named_as_in_recipe(where):
        check_allow(config.allow)
        parse_release(config.sglang)
    return config


def as_in_recipe(
    findings: Iterable[Finding], where: str, given: Collection[str] = ()
) -> list[Finding]:
    """Findings about options, with the recipe's keys as subjects.

    Args:
        findings: Some may be about an option of the command line.
        where: Dotted place of the recipe's ``init_args``.
        given: Arguments that the command line has, which wins over the recipe.
    """
    keys = {
        f"--{name.replace('_', '-')}": f"{where}.{name}"
        for name in CallbackConfig.model_fields
        if name not in given
    }
    return [replace(f, subject=keys.get(f.subject, f.subject)) for f in findings]


@contextmanager
def named_as_in_recipe(where: str, given: Collection[str] = ()) -> Iterator[None]:
    """The same for the findings of an error; arguments as in ``as_in_recipe``."""
    try:
        yield
    except SpecExportError as problem:
        findings = as_in_recipe(problem.findings, where, given)
        raise SpecExportError(findings, problem.exit_code) from problem


def _argument_finding(
    subject: str, location: list[str], problem: ErrorDetails
) -> Finding:
    kind, field_name = problem["type"], location[-1]
    if kind == "missing":
        return error("callback-argument", subject, "it is required")
    if location == ["every"]:
        return error(
            "callback-argument",
            subject,
            f"{problem['input']!r}: it must be checkpoint, best or {{steps: N}} with N "
            "above 0",
        )
    if location == ["allow"]:
        return error(
            "callback-argument",
            subject,
            f"{problem['input']!r}: it must be a list of codes",
            f"write allow: [{problem['input']}]"
            if isinstance(problem["input"], str)
            else "write it as in allow: [target-differs]",
        )
    if kind == "extra_forbidden":
        names = ", ".join(CallbackConfig.model_fields)
        return error(
            "callback-argument",
            subject,
            f"there is no argument {field_name}",
            f"SGLangExport takes {names}" if len(location) == 1 else None,
        )
    why = problem["msg"].removeprefix("Value error, ")
    return error(
        "callback-argument",
        subject,
        f"{problem['input']!r}: {why[:1].lower()}{why[1:]}",
        'put the release between quotes, as in "0.5.17"'
        if field_name == "sglang"
        else None,
    )


def check_output_dir(
    output_dir: Path, save_path: Path, where: str = "init_args"
) -> None:
    """Refuse exports inside speculators' save_path.

    ``--save-best`` deletes there whatever it did not write itself. The reverse, a
    save_path inside ``output_dir``, is harmless.

    Raises:
        SpecExportError: exit 2 ``output-inside-save-path``.
    """
    output, save = output_dir.resolve(), save_path.resolve()
    if output == save or save in output.parents:
        raise usage_error(
            "output-inside-save-path",
            f"{where}.output_dir",
            f"{output_dir} is inside the save_path {save_path}, where speculators "
            "deletes what it did not write (--save-best)",
            "choose an output_dir beside it",
        )
