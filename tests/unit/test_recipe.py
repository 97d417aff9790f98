"""The callbacks block of a recipe."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from spec_export.findings import SpecExportError
from spec_export.training import recipe as r

EXPORT = "  - class_path: spec_export.SGLangExport\n    init_args: {output_dir: out}\n"


def read(tmp_path: Path, text: str) -> r.Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return r.read_recipe(path)


def refused(tmp_path: Path, text: str) -> dict[str, str]:
    """Code by subject of what is refused, always with exit code 2."""
    with pytest.raises(SpecExportError) as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2
    return {f.subject: f.code for f in caught.value.findings}


def test_defaults_are_those_of_the_contract(tmp_path: Path) -> None:
    found = read(tmp_path, f"train: {{seed: 1}}\ncallbacks:\n{EXPORT}")
    (entry,) = found.exporters
    assert entry.config is not None
    assert found.train == {"seed": 1}
    assert entry.config.model_dump() == {
        "output_dir": Path("out"),
        "every": "checkpoint",
        "keep_last": None,
        "sglang": None,
        "plugin": "auto",
        "dtype": None,
        "max_shard_size": None,
        "compare": {
            "on": "checkpoint",
            "positions": 256,
            "steps": 3,
            "max_seconds": 10,
        },
        "allow": (),
        "on_error": "warn",
        "background": True,
        "when_busy": None,
    }


def test_a_recipe_without_callbacks(tmp_path: Path) -> None:
    assert read(tmp_path, "train: {}\n").callbacks == ()
    assert read(tmp_path, "train: {}\ncallbacks:\n").callbacks == ()


def test_every_can_be_a_number_of_steps() -> None:
    config = r.parse_init_args({"output_dir": "o", "every": {"steps": 25}})
    assert config.every == r.EverySteps(steps=25)


def test_yaml_reads_the_key_on_as_true(tmp_path: Path) -> None:
    text = EXPORT.replace("out}", "out, compare: {on: never, steps: 4}}")
    (entry,) = read(tmp_path, f"train: {{}}\ncallbacks:\n{text}").exporters
    config = entry.config
    assert config is not None
    assert (config.compare.on, config.compare.steps) == ("never", 4)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"train:\n  callbacks:\n{EXPORT}", "train.callbacks"),
        ("train:\n  trainer:\n    callbacks: []\n", "train.trainer.callbacks"),
        (f"speculator_type: eagle3\ncallbacks:\n{EXPORT}", "callbacks"),
    ],
)
def test_misplaced_callbacks_are_refused(tmp_path: Path, text: str, place: str) -> None:
    assert refused(tmp_path, text) == {place: "callbacks-misplaced"}


def test_only_known_classes_are_imported(tmp_path: Path) -> None:
    text = "train: {}\ncallbacks:\n  - class_path: os.system\n"
    assert refused(tmp_path, text) == {"callbacks[0]": "callback-unknown"}


@pytest.mark.parametrize("spelling", ["other", "package.module.Other"])
def test_an_entry_point_is_found_by_name_and_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    point = EntryPoint("other", "package.module:Other", r.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        r, "entry_points", lambda group: [point] if group == point.group else []
    )
    text = f"train: {{}}\ncallbacks:\n  - class_path: {spelling}\n"
    (entry,) = read(tmp_path, text).callbacks
    assert (entry.entry_point, entry.config) == (point, None)


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("train: {}\ncallbacks: {a: 1}\n", "callbacks"),
        ("train: {}\ncallbacks: [7]\n", "callbacks[0]"),
        (
            "train: {}\ncallbacks:\n- {class_path: x, output_dir: y}\n",
            "callbacks[0].output_dir",
        ),
        (
            f"train: {{}}\ncallbacks:\n{EXPORT}".replace("{output_dir: out}", "[1]"),
            "callbacks[0].init_args",
        ),
        ("just a word", "recipe.yaml"),
        ("train: [", "recipe.yaml"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, subject: str) -> None:
    assert refused(tmp_path, text) == {subject: "recipe-invalid"}


def test_an_absent_recipe(tmp_path: Path) -> None:
    with pytest.raises(SpecExportError) as caught:
        r.read_recipe(tmp_path / "absent.yaml")
    assert caught.value.exit_code == 2
    assert caught.value.findings[0].code == "path-missing"


@pytest.mark.parametrize(
    ("wrong", "subject", "part"),
    [
        ({"output_dir": ""}, "init_args.output_dir", "name a folder"),
        ({"every": "epoch"}, "init_args.every", "'epoch': it must be checkpoint, best"),
        ({"every": {"steps": 0}}, "init_args.every", "{'steps': 0}: it must"),
        ({"every": {"steps": 1, "x": 2}}, "init_args.every", "{'steps': 1, 'x': 2}: "),
        ({"allow": "target-differs"}, "init_args.allow", "must be a list of codes"),
        ({"allow": None}, "init_args.allow", "None: it must be a list of codes"),
        ({"allow": [3]}, "init_args.allow.0", "3: "),
        ({"keep_last": 0}, "init_args.keep_last", "0: "),
        ({"sglang": 0.6}, "init_args.sglang", "0.6: "),
        ({"plugin": "maybe"}, "init_args.plugin", "'maybe': "),
        ({"dtype": "int8"}, "init_args.dtype", "'int8': "),
        ({"max_shard_size": "big"}, "init_args.max_shard_size", "5GB"),
        ({"compare": {"on": "x"}}, "init_args.compare.on", "'x': "),
        ({"compare": {"one": 1}}, "init_args.compare.one", "no argument one"),
        ({"on_error": "ignore"}, "init_args.on_error", "'ignore': "),
        ({"interval": 1}, "init_args.interval", "no argument interval"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(
    wrong: dict[str, object], subject: str, part: str
) -> None:
    with pytest.raises(SpecExportError) as caught:
        r.parse_init_args({"output_dir": "o", **wrong})
    (finding,) = caught.value.findings
    assert (finding.code, finding.subject) == ("callback-argument", subject)
    assert part in finding.message
    assert caught.value.exit_code == 2


def test_every_wrong_argument_is_reported_at_once() -> None:
    with pytest.raises(SpecExportError) as caught:
        r.parse_init_args({"plugin": "x", "keep_last": -1})
    assert {f.subject for f in caught.value.findings} == {
        "init_args.output_dir",
        "init_args.plugin",
        "init_args.keep_last",
    }


@pytest.mark.parametrize(
    ("argument", "subject"),
    [
        ("allow: [target-differs, non-finite]", "allow"),
        ("allow: [no-such-code]", "allow"),
        ("sglang: 9.x", "sglang"),
        ('sglang: "0.1"', "sglang"),
    ],
)
def test_an_option_in_the_recipe_is_called_by_its_key_there(
    tmp_path: Path, argument: str, subject: str
) -> None:
    r.parse_init_args({"output_dir": "o", "allow": ["target-differs"]})
    text = EXPORT.replace("out}", f"out, {argument}}}")
    assert refused(tmp_path, f"train: {{}}\ncallbacks:\n{text}") == {
        f"callbacks[0].init_args.{subject}": "option-invalid"
    }


@pytest.mark.parametrize("output", ["run", "run/exports", "run/../run/x", "link/x"])
def test_exports_inside_save_path_are_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(SpecExportError) as caught:
        r.check_output_dir(tmp_path / output, tmp_path / "run")
    assert caught.value.findings[0].code == "output-inside-save-path"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("output", ["exports", "run2", "run/../exports"])
def test_exports_beside_or_around_save_path_are_fine(
    tmp_path: Path, output: str
) -> None:
    r.check_output_dir(tmp_path / output, tmp_path / "run")
    r.check_output_dir(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--config", "a.yaml", "--epochs", "1"], Path("a.yaml")),
        (["--epochs", "1", "--config=a.yaml"], Path("a.yaml")),
        (["--epochs", "1"], None),
    ],
)
def test_the_recipe_is_found_among_the_flags(
    argv: list[str], found: Path | None
) -> None:
    assert r.config_path(argv) == found
