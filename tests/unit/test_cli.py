"""The command line as a contract: exit codes, one JSON object, where output goes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spec_export as package
from spec_export import cli, findings
from tests.helpers import field
from tests.helpers.cli import spec_export

PACKAGE = Path(package.__file__).parent


@pytest.fixture
def export(tmp_path: Path) -> Path:
    target = field.make_target(tmp_path / "T0")
    draft = field.make_draft(tmp_path / "E0", target)
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out, "--no-compare").code == 0
    return out


@pytest.mark.parametrize(
    "argv",
    [
        ("finalize",),
        ("finalize", "/nowhere", "--output", "x"),
        ("verify", "/nowhere"),
        ("show", "/nowhere"),
        ("diff", "/nowhere", "/nowhere"),
        ("check", "/nowhere.yaml"),
        ("verify", ".", "--nonsense"),
        ("verify", ".", "--files-only", "--sglang", "zero"),
        ("nonsense",),
        ("finalize", ".", "--output", "x", "--sglang", "zero"),
        ("finalize", ".", "--output", "x", "--sglang", "0.1"),
        ("verify", ".", "--allow", "no-such-code"),
        ("verify", ".", "--allow", "non-finite"),
        ("finalize", ".", "--plugin", "perhaps", "--output", "x"),
    ],
)
def test_a_wrong_question_is_exit_2_with_one_object(argv: tuple[str, ...]) -> None:
    ran = spec_export(*argv)
    assert ran.code == 2
    assert ran.data["ok"] is False
    assert ran.data["findings"][0]["severity"] == "error"


def test_every_command_answers_in_json(export: Path) -> None:
    for argv, key in (
        (("verify", export), "status"),
        (("show", export), "manifest"),
        (("show", export, "--tensors"), "tensors"),
        (("show", export, "--launch"), "launch"),
        (("diff", export, export), "differences"),
        (("doctor",), "checks"),
    ):
        ran = spec_export(*argv)
        assert ran.code == 0, ran.data
        assert key in ran.data
        assert ran.data["command"] == argv[0]


def test_a_bug_is_101_and_shows_no_traceback(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_export.serving import verify

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(verify, "verify", broken)
    ran = spec_export("verify", export)
    assert (ran.code, ran.codes()) == (101, ["internal-error"])
    assert "Traceback" not in ran.stderr
    monkeypatch.setenv("SPEC_EXPORT_DEBUG", "1")
    with pytest.raises(RuntimeError, match="on purpose"):
        cli.run(["verify", str(export)])


def loaded(*argv: object) -> set[str]:
    """What a command imports, of that which a check of bytes has no use for."""
    code = (
        "import sys; from spec_export import cli; assert cli.run(sys.argv[1:]) == 0\n"
        "print(*({'numpy', 'yaml', 'packaging', 'torch'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_a_check_of_bytes_starts_without_what_it_does_not_use(export: Path) -> None:
    assert loaded("verify", export, "--files-only") == set()
    assert loaded("verify", export) == {"numpy", "yaml", "packaging"}


def test_diff_says_what_differs(export: Path, tmp_path: Path) -> None:
    target = tmp_path / "T0"
    tensors = field.draft_tensors(target)
    tensors["fc.weight"][0] += 1
    draft = field.write_draft(tmp_path / "E1", field.draft_config(target), tensors)
    other = tmp_path / "other"
    assert spec_export("finalize", draft, "--output", other, "--no-compare").code == 0
    ran = spec_export("diff", export, other)
    assert ran.code == 1
    assert [d["name"] for d in ran.data["differences"] if d["kind"] == "tensor"] == [
        "fc.weight"
    ]


def test_the_launch_line_names_draft_and_target(export: Path) -> None:
    argv = spec_export("show", export, "--launch", "--target", "/models/t").data[
        "launch"
    ]
    assert argv[:4] == ["python", "-m", "sglang.launch_server", "--model-path"]
    assert argv[4] == "/models/t"
    assert argv[argv.index("--speculative-draft-model-path") + 1] == str(export)
    assert argv[argv.index("--speculative-num-draft-tokens") + 1] == "4"


def test_people_read_stderr_and_scripts_stdout(export: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "spec_export.cli",
            "verify",
            str(export),
            "--sglang",
            "9",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert ran.returncode == 0
    assert "warning[release-unknown]" in ran.stderr and "  hint: " in ran.stderr
    assert "release-unknown" not in ran.stdout


def test_a_signal_is_128_plus_its_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import os, signal; from spec_export import cli\n"
        "import spec_export.serving.verify as v\n"
        "v.verify = lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"import sys; sys.argv = ['spec-export', 'verify', {str(tmp_path)!r}]\n"
        "cli.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 143


def test_a_reader_that_leaves_is_no_bug(export: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "spec_export.cli", "show", str(export), "--json"]
    ran = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_training_without_speculators_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "speculators", None)
    assert cli.run(["train", "--config", "recipe.yaml"]) == 2
    said = capsys.readouterr().err
    assert "error[dependency-missing] speculators: " in said
    assert 'hint: pip install "spec-export[train]"' in said


def test_a_comparison_without_torch_names_an_option_that_verify_has(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = spec_export("verify", export, "--compare")
    assert (ran.code, ran.codes()) == (2, ["dependency-missing"])
    assert ran.data["findings"][0]["hint"].endswith("or verify without --compare")


def test_the_last_line_of_verify_is_its_answer(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(export)]) == 0
    assert "out: no errors; status final, recorded" in capsys.readouterr().err
    (export / "config.json").unlink()
    assert cli.run(["verify", str(export)]) == 1
    said = capsys.readouterr().err
    assert "out: 1 error; status final" in said
    assert "hint: copy the export again" in said


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_manifest_that_is_none_is_told_in_words(export: Path, content: str) -> None:
    (export / "spec_export_manifest.json").write_text(content)
    ran = spec_export("verify", export)
    (finding,) = ran.data["findings"]
    assert (ran.code, finding["code"]) == (1, "manifest-invalid")
    assert "Error(" not in finding["message"] and finding["hint"]


def test_the_folder_of_all_exports_is_told_apart_from_one(tmp_path: Path) -> None:
    for command in ("verify", "show"):
        ran = spec_export(command, tmp_path)
        assert (ran.code, ran.codes()) == (2, ["path-missing"])
        assert "OUTPUT_DIR/best" in ran.data["findings"][0]["hint"]


def test_without_a_manifest_only_what_was_looked_at_is_called_checked(
    export: Path, tmp_path: Path
) -> None:
    (export / "spec_export_manifest.json").unlink()
    alone = spec_export("verify", export).finding("manifest-missing")
    both = spec_export("verify", export, "--target", tmp_path / "T0")
    assert "against the target" not in alone["message"]
    assert "against the target too" in both.finding("manifest-missing")["message"]


def test_tables_cut_no_name() -> None:
    from spec_export.report.screen import table

    name = "layers.0." * 40
    lines = table(("name", "n"), [(name, 1), ("x", 2)]).splitlines()
    assert any(name in line for line in lines)
    assert lines == [line.rstrip() for line in lines if line]


def test_only_the_command_line_prints_or_exits() -> None:
    allowed = {PACKAGE / "cli.py", PACKAGE / "train.py", PACKAGE / "training/launch.py"}
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path in allowed or "_data" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("print", "sys.exit", "exit", "typer.echo"):
                    offenders.append(f"{path.name}:{node.lineno} {called}")
    assert offenders == []


def test_every_code_is_used_and_every_used_code_is_known() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    templates = PACKAGE.parent / "ckpt_templates"
    text = "".join(p.read_text() for p in templates.glob("*.yaml"))
    unused = [c for c in findings.CODES if c not in used and f": {c}" not in text]
    assert unused == []


def test_codes_have_a_meaning_and_unknown_ones_are_refused() -> None:
    assert all(code.meaning for code in findings.CODES.values())
    with pytest.raises(KeyError):
        findings.error("no-such-code", "x", "y")


def test_json_is_what_json_says(export: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "spec_export.cli", "show", str(export), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout)["manifest"]["schema"].startswith("urn:spec-export")
    assert "torch" not in ran.stderr
