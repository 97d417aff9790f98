"""The commands: each reads its options, calls a room and returns what there is to say.

Rooms are imported inside the commands, so that ``--help`` and ``show`` stay fast.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from spec_export.findings import (
    Finding,
    Severity,
    error,
    has_errors,
    usage_error,
)

app = typer.Typer(
    name="spec-export",
    help="Save speculators drafts in the layout that SGLang loads, and prove it.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Sglang = Annotated[
    str | None,
    typer.Option("--sglang", help="Oldest SGLang release that will serve it."),
]
TargetDir = Annotated[
    Path | None,
    typer.Option("--target", help="The target: a folder, or a name in the hub cache."),
]
Plugin = Annotated[
    str | None, typer.Option("--plugin", help="auto, never or always.", metavar="P")
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", help="Accept a deviation by its code; repeatable."),
]


@dataclass
class Outcome:
    """What a command has to say.

    Attributes:
        findings: Printed as ``error[code] subject: message``.
        data: What ``--json`` adds to the object.
        text: For a person.
        shown: The text is the thing asked for, so it goes to stdout.
        answer: False where the answer is no without an error finding.
    """

    findings: list[Finding] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    shown: bool = False
    answer: bool = True


def _one_of(option: str, value: str, *known: str) -> Any:
    if value not in known:
        raise usage_error(
            "option-invalid",
            option,
            f"{value!r} is unknown",
            f"one of {', '.join(known)}",
        )
    return value


def _device(value: str) -> Any:
    return _one_of("--device", value, "auto", "cpu", "cuda")


def _folder(path: Path) -> Path:
    """A model's folder, with a manifest or without.

    Raises:
        SpecExportError: exit 2, ``path-missing``.
    """
    name = path.name or str(path)
    if not path.is_dir():
        raise usage_error("path-missing", name, f"{path} is not a folder")
    if not any(
        (path / n).exists() for n in ("spec_export_manifest.json", "config.json")
    ):
        raise usage_error(
            "path-missing",
            "config.json",
            f"is not there, nor is spec_export_manifest.json: {path} is no model",
            "give the folder of one export, such as OUTPUT_DIR/best",
        )
    return path


def _plugin(value: str | None, default: str | None = "auto") -> Any:
    if value is None:
        return default
    return _one_of("--plugin", value, "auto", "never", "always")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def train(ctx: typer.Context) -> int:
    """Train with the callbacks of a recipe; takes every speculators train flag."""
    _need("speculators")
    from spec_export.training.launch import main as launch

    return launch(ctx.args)


@app.command()
def check(
    recipe: Annotated[Path, typer.Argument(help="A speculators recipe (YAML).")],
    sglang: Sglang = None,
    target: TargetDir = None,
    plugin: Plugin = None,
    allow: Allow = None,
    as_json: Json = False,
) -> Outcome:
    """Before any training: can what this recipe will train be served?"""
    if not recipe.is_file():
        name = recipe.name or str(recipe)
        raise usage_error("path-missing", name, f"{recipe} is not a file")
    _need("speculators")
    from spec_export.check import check_recipe
    from spec_export.report.screen import plan_text

    result = check_recipe(
        recipe,
        sglang=sglang,
        plugin=_plugin(plugin, None),
        allow=tuple(allow or ()),
        target=target,
    )
    from spec_export.report.screen import plan_json

    return Outcome(
        result.findings,
        {
            "plan": plan_json(result),
            "min_version": result.plan.min_version or None,
            "requires_plugin": result.plan.requires_plugin,
        },
        plan_text(result),
    )


@app.command()
def finalize(
    source: Annotated[Path, typer.Argument(help="Checkpoint, run or export.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the export goes.")
    ] = None,
    sglang: Sglang = None,
    target: TargetDir = None,
    plugin: Plugin = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Forward comparison.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32.")
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Such as 5GB.")] = None,
    allow: Allow = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an export at the output path.")
    ] = False,
    merge: Annotated[
        Path | None,
        typer.Option("--merge-into", help="MTP: a copy of this target with the head."),
    ] = None,
    as_json: Json = False,
) -> Outcome:
    """Turn a checkpoint, a training folder or a saved export into a final export."""
    from spec_export.export import ExportOptions
    from spec_export.finalize import FinalizeOptions, summary
    from spec_export.finalize import finalize as run
    from spec_export.report.screen import final_text

    device = _device(device)
    if merge is not None:
        others = {
            "--target": target,
            "--plugin": plugin,
            "--dtype": dtype,
            "--max-shard-size": max_shard_size,
            "--force": force,
        }
        for option in (name for name, given in others.items() if given):
            raise usage_error(
                "option-invalid",
                option,
                "it means nothing with --merge-into, which copies a target as it is",
                "leave it out",
            )
        return _merge(
            source,
            merge,
            output,
            ExportOptions(sglang=sglang, allow=tuple(allow or ())),
            compare,
            device,
        )
    options = FinalizeOptions(
        output=output,
        target=target,
        compare=compare,
        device=device,
        force=force,
        export=ExportOptions(
            sglang=sglang,
            plugin=_plugin(plugin),
            allow=tuple(allow or ()),
            dtype=dtype,
            max_shard_size=max_shard_size,
            status="final",
        ),
    )
    result = run(source, options)
    return Outcome(result.findings, summary(result), final_text(result))


def _merge(
    source: Path,
    into: Path,
    output: Path | None,
    options: Any,
    compare: bool,
    device: str,
) -> Outcome:
    from spec_export.merge import merge_into

    if output is None:
        raise usage_error(
            "option-invalid", "--output", "it is needed", "--output DIR, a new folder"
        )
    result = merge_into(source, into, output, options, compare=compare, device=device)
    return Outcome(result.findings, result.summary(), result.text())


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="An export, or any draft folder.")],
    target: TargetDir = None,
    sglang: Sglang = None,
    allow: Allow = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Repeat the forward comparison.")
    ] = False,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Only the files' digests.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> Outcome:
    """The deployer's check: is this folder what it says, does it fit the target?"""
    from spec_export.findings import check_allow
    from spec_export.serving.verify import verify as run

    check_allow(allow or ())
    device = _device(device)
    if compare:
        from spec_export import comparison

        comparison.require(hint="or verify without --compare")
    opened = None
    if target is not None:
        from spec_export.artifact.target import open_target

        opened = open_target(target)
    result = run(
        _folder(folder),
        opened,
        sglang=sglang,
        allow=tuple(allow or ()),
        files_only=files_only,
    )
    data: dict[str, Any] = {"status": result.status, "verdict": result.verdict}
    if compare and not has_errors(result.findings):
        leg = comparison.leg_of_probe(folder, opened, device, sglang)
        result.findings += leg.findings
        if leg.verdict == "fail" and not has_errors(leg.findings):
            result.findings.append(error("comparison-failed", "layout", leg.reason))
        if leg.verdict == "not run":
            result.findings.append(error("comparison-not-run", "--compare", leg.reason))
        data |= {"verdict": leg.verdict, "comparison": leg.to_json()}
    wrong = sum(f.severity == Severity.ERROR for f in result.findings)
    answer = f"{wrong or 'no'} error{'s' * (wrong != 1)}"
    words = f"{folder}: {answer}; status {data['status']}, "
    words += "" if compare else "recorded "
    words += f"comparison {data['verdict']}"
    return Outcome(result.findings, data, words)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="An export.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor.")] = False,
    launch: Annotated[
        bool, typer.Option("--launch", help="The exact server command.")
    ] = False,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="The manifest itself.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="For the launch line.")
    ] = None,
    as_json: Json = False,
) -> Outcome:
    """The manifest for a person, or the server command."""
    from spec_export.artifact.manifest import Manifest
    from spec_export.report import screen
    from spec_export.serving.launch import launch_argv, launch_line

    if tensors + launch + manifest > 1:
        raise usage_error(
            "option-invalid",
            "--tensors, --launch, --manifest",
            "they exclude one another",
            "give one of them",
        )
    content = Manifest.read(_folder(folder))
    if launch:
        argv = launch_argv(content, folder, target)
        return Outcome([], {"launch": argv}, launch_line(content, folder, target), True)
    if tensors:
        table = content.to_json()["tensors"]
        return Outcome([], {"tensors": table}, screen.tensor_text(content), True)
    whole = content.to_json()
    text = json.dumps(whole, indent=2) if manifest else screen.show_text(content)
    return Outcome([], {"manifest": whole}, text, True)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="An export.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Json = False,
) -> Outcome:
    """Which tensors, config keys and facts differ; exit 1 if any does."""
    from spec_export.report.screen import diff_text
    from spec_export.serving.diff import diff as run

    found = run(_folder(a), _folder(b))
    return Outcome(
        [],
        {"differences": found},
        diff_text(found),
        shown=True,
        answer=not found,
    )


@app.command()
def doctor(as_json: Json = False) -> Outcome:
    """Versions, devices, what is missing, each with its fix."""
    from spec_export.report.doctor import examine

    rows, findings = examine()
    text = "\n".join(
        f"{r['what']:<14} {r['state']}" + (f": {r['fix']}" if r["fix"] else "")
        for r in rows
    )
    return Outcome(findings, {"checks": rows}, text, True)


def _need(package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise usage_error(
            "dependency-missing",
            package,
            "is not installed; this command asks its own code",
            'pip install "spec-export[train]"',
        )
