"""Who may import whom, and that what a deployer runs does not load torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "spec_export"

# A room is a subpackage or a module at the top; it may import itself, the package
# root and what is listed. `cli` and the root join all rooms.
MAY_IMPORT: dict[str, set[str]] = {
    "findings": set(),
    "layout": {"findings"},
    "artifact": {"findings", "layout"},
    "judge": {"findings"},
    "export": {"findings", "layout", "artifact", "judge"},
    "comparison": {"findings", "layout", "artifact", "judge"},
    "serving": {"findings", "layout", "artifact"},
    "report": {"findings", "layout", "artifact", "judge", "serving"},
    "finalize": {
        "findings",
        "layout",
        "artifact",
        "judge",
        "comparison",
        "export",
        "serving",
        "report",
    },
    # Writes no draft folder but a copy of a target: a pipeline of its own.
    "merge": {"findings", "layout", "artifact", "judge", "comparison", "export"},
    # What a recipe says is read by `training`; whether it can be served is for `check`
    # to say, before the first step as well.
    "check": {"findings", "layout", "artifact", "export", "training"},
    "training": {
        "findings",
        "layout",
        "artifact",
        "judge",
        "comparison",
        "export",
        "check",
    },
    "train": {"training"},
    "cli": {"findings", "commands"},
}
# For annotations alone: what `report` shows is made by those who call it.
MAY_NAME: dict[str, set[str]] = {"report": {"check", "finalize"}}
JOINS_ALL = {"__init__", "commands"}
# Serving reads exports and never writes one.
WRITING_SIDE = {f"{PACKAGE}.artifact.writer", f"{PACKAGE}.artifact.publish"}
# Loading one of these costs seconds or needs an accelerator's libraries.
HEAVY = {"accelerate", "datasets", "sglang", "speculators", "torch", "transformers"}
HEAVY_ROOMS = {"judge", "training", "train"}
# Modules that only SGLang's own process imports, when it loads a draft.
INSIDE_SGLANG = (f"{PACKAGE}.serving.landing", f"{PACKAGE}.serving.models")
MAY_EXIT = {"cli", "train"}


@dataclass(frozen=True)
class Import:
    """One import statement of a module.

    `runs` is whether importing the module runs it (not inside a function); one that is
    for type checkers only never runs.
    """

    target: str
    line: int
    runs: bool
    types_only: bool


def module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def may_be_heavy(module: str) -> bool:
    return room(module) in HEAVY_ROOMS or module.startswith(INSIDE_SGLANG)


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def imported_names(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """What one statement or call imports, with relative names resolved."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=name, names=names, level=level):
            base = name or ""
            if level:
                parts = module.split(".")
                parts = parts[: len(parts) - level + is_package]
                base = ".".join([*parts, *([name] if name else [])])
            # `from spec_export import layout` imports a room.
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__")
            | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def find_imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    def visit(node: ast.AST, runs: bool, types_only: bool) -> Iterator[Import]:
        for name in imported_names(node, module, is_package):
            yield Import(name, node.lineno, runs and not types_only, types_only)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            runs = False
        guarded = isinstance(node, ast.If) and is_type_checking(node.test)
        for child in ast.iter_child_nodes(node):
            inside = guarded and child in node.body
            yield from visit(child, runs, types_only or inside)

    yield from visit(tree, True, False)


def exits(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="exit" | "quit" | "SystemExit")):
                yield node.lineno
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="sys" | "os"), attr="exit" | "_exit"
                )
            ):
                yield node.lineno


def speculators_allowed(module: str, target: str) -> bool:
    trains = (target + ".").startswith("speculators.train.")
    if module == f"{PACKAGE}.judge.probe":
        return not trains
    models = target.startswith("speculators.model")
    return room(module) in {"training", "train"} and not models


def violations(root: Path) -> list[str]:
    """Everything in the package under `root` that breaks a rule."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if "_data" in path.relative_to(root).parts:
            continue
        module = module_name(path, root)
        here = room(module)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        if here not in MAY_EXIT:
            found += [f"{module}:{line} exits" for line in exits(tree)]
        if here not in JOINS_ALL and here not in MAY_IMPORT:
            found.append(f"{module} is in a room without rules")
            continue
        for imported in find_imports(tree, module, path.name == "__init__.py"):
            target, where = imported.target, f"{module}:{imported.line}"
            top = target.split(".")[0]
            if top == PACKAGE and here not in JOINS_ALL:
                there = room(target)
                # Any other name of the root is an attribute of it (`__version__`).
                known = there in MAY_IMPORT or there in JOINS_ALL - {"__init__"}
                allowed = MAY_IMPORT[here] | {here}
                if imported.types_only:
                    allowed |= MAY_NAME.get(here, set())
                if known and there not in allowed:
                    found.append(f"{where} imports {target}")
                if here == "serving" and any(
                    (target + ".").startswith(side + ".") for side in WRITING_SIDE
                ):
                    found.append(f"{where} imports the writing side, {target}")
            if top == "speculators" and not speculators_allowed(module, target):
                found.append(f"{where} imports {target}")
            if top in HEAVY and imported.runs and not may_be_heavy(module):
                found.append(f"{where} loads {target} when it is imported")
    return found


def light_modules(root: Path) -> list[str]:
    modules = [module_name(p, root) for p in sorted((root / PACKAGE).rglob("*.py"))]
    return [m for m in modules if not may_be_heavy(m) and "_data" not in m]


def heavy_after_import(root: Path, modules: list[str]) -> dict[str, list[str]]:
    """Import modules one by one in a fresh process.

    Returns the heavy packages that each brought in, for those that brought any.
    """
    script = f"""
import importlib, json, sys
heavy = set({sorted(HEAVY)!r})
seen, out = set(), {{}}
for name in {modules!r}:
    importlib.import_module(name)
    new = {{m.split(".")[0] for m in sys.modules}} & heavy - seen
    seen |= new
    if new:
        out[name] = sorted(new)
print(json.dumps(out))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rooms_of_the_design_are_there() -> None:
    assert "spec_export.layout.plan_types" in light_modules(ROOT)
    assert room("spec_export") == "__init__"


def test_nobody_imports_against_the_rules() -> None:
    assert violations(ROOT) == []


def test_importing_light_modules_loads_nothing_heavy() -> None:
    assert heavy_after_import(ROOT, light_modules(ROOT)) == {}


def fake_tree(root: Path, files: dict[str, str]) -> Path:
    for name in ["", "layout", "artifact", "judge", "report", "serving", "training"]:
        folder = root / PACKAGE / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
    for name, text in files.items():
        (root / PACKAGE / name).write_text(text)
    return root


TYPE_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
GOOD = {
    "__init__.py": "def __getattr__(name):\n    from spec_export.training import x\n",
    "layout/data.py": "from spec_export import __version__, findings\n",
    "layout/typed.py": TYPE_ONLY + "import torch\n",
    "artifact/source.py": "from ..layout import plan\nfrom .header import read\n",
    "export.py": "def run():\n    import torch\n    from spec_export.judge import r\n",
    "judge/run.py": "import torch\nfrom spec_export.judge import probe\n",
    "judge/probe.py": "from speculators.models.eagle3 import Eagle3DraftModel\n",
    "serving/verify.py": "from spec_export.artifact import manifest\n",
    "report/a.py": TYPE_ONLY + "from spec_export.check import CheckResult\n",
    "training/launch.py": "from speculators.train.config import TrainConfig\n",
    "cli.py": "import sys\ndef main():\n    sys.exit(1)\n",
}


def test_a_good_tree_passes(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir()
    assert violations(fake_tree(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("findings.py", "import spec_export.layout", "spec_export.findings:1 imports"),
        ("layout/a.py", "from spec_export import artifact", "layout.a:1 imports"),
        ("layout/a.py", "from .. import artifact", "imports spec_export.artifact"),
        ("layout/a.py", "from ..export import run", "imports spec_export.export.run"),
        ("artifact/a.py", "from spec_export.export import run", "artifact.a:1"),
        ("artifact/a.py", "from spec_export.cli import main", "artifact.a:1 imports"),
        ("judge/a.py", "from spec_export.layout import rope", "judge.a:1 imports"),
        ("judge/a.py", "import spec_export.artifact.source", "judge.a:1 imports"),
        ("judge/a.py", TYPE_ONLY + "import spec_export.export", "judge.a:3 imports"),
        ("report/a.py", "from spec_export.check import C", "report.a:1 imports"),
        (
            "layout/a.py",
            TYPE_ONLY + "pass\nelse:\n    import torch",
            "layout.a:5 loads torch",
        ),
        (
            "judge/a.py",
            "import importlib\nimportlib.import_module('spec_export.layout.plan')",
            "judge.a:2 imports spec_export.layout.plan",
        ),
        (
            "judge/a.py",
            "def f():\n    from spec_export.layout import plan",
            "judge.a:2 imports",
        ),
        ("judge/a.py", "from speculators.models import x", "judge.a:1 imports"),
        ("judge/probe.py", "import speculators.train.trainer", "probe:1 imports"),
        ("training/a.py", "from speculators.models import x", "training.a:1 imports"),
        ("training/a.py", "from speculators.model import x", "training.a:1 imports"),
        (
            "layout/a.py",
            "def f():\n    from speculators.train import x",
            "layout.a:2 imports speculators.train.x",
        ),
        ("serving/a.py", "from spec_export.training import x", "serving.a:1 imports"),
        (
            "serving/a.py",
            "from spec_export.artifact.writer import write",
            "serving.a:1 imports the writing side",
        ),
        (
            "serving/a.py",
            "from spec_export.artifact import publish",
            "serving.a:1 imports the writing side",
        ),
        ("export.py", "import torch", "spec_export.export:1 loads torch"),
        ("cli.py", "from torch import nn", "spec_export.cli:1 loads torch.nn"),
        ("__init__.py", "import transformers", "spec_export:1 loads transformers"),
        (
            "artifact/a.py",
            "try:\n    import torch\nexcept ImportError:\n    torch = None",
            "artifact.a:2 loads torch",
        ),
        ("layout/a.py", "class A:\n    import torch", "layout.a:2 loads torch"),
        ("layout/a.py", "import sys\nsys.exit(1)", "layout.a:2 exits"),
        ("export.py", "raise SystemExit(2)", "spec_export.export:1 exits"),
        ("new.py", "", "spec_export.new is in a room without rules"),
    ],
)
def test_each_break_of_a_rule_is_found(
    tmp_path: Path, file: str, text: str, message: str
) -> None:
    (tmp_path / PACKAGE).mkdir()
    found = violations(fake_tree(tmp_path, {**GOOD, file: text}))
    assert len(found) == 1, found
    assert message in found[0]


def test_a_heavy_import_by_a_detour_is_found(tmp_path: Path) -> None:
    """`commands` imports a room that loads torch itself: only running shows it."""
    (tmp_path / PACKAGE).mkdir()
    files = {
        "cli.py": "import spec_export.commands",
        "commands.py": "import spec_export.judge.run",
        "judge/run.py": "import torch",
    }
    # A stand-in, so that the test needs no torch and costs nothing.
    (tmp_path / "torch.py").write_text("")
    root = fake_tree(tmp_path, files)
    assert violations(root) == []
    assert heavy_after_import(root, ["spec_export", "spec_export.cli"]) == {
        "spec_export.cli": ["torch"]
    }
