"""Strict loading before the server starts, and the plug-in without an SGLang."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from spec_export.artifact.manifest import MANIFEST_NAME
from spec_export.findings import SpecExportError
from spec_export.serving import plugin, strict
from tests.helpers import field
from tests.helpers.cli import spec_export

RELEASE = "0.5.23"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(strict._CHECKED, "")  # which a launch changes


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return field.make_target(tmp_path / "T0")


@pytest.fixture
def export(tmp_path: Path, target: Path) -> Path:
    draft = field.make_draft(tmp_path / "E0", target)
    out = tmp_path / "out"
    ran = spec_export("finalize", draft, "--output", out, "--no-compare")
    assert ran.code == 0, ran.data
    return out


def refused(export: Path, target: Path, release: str = RELEASE) -> list[str]:
    """The codes with which a launch is refused."""
    with pytest.raises(strict.DraftRefused) as caught:
        strict.check_launch(str(export), str(target), release)
    assert str(export) in str(caught.value)
    return sorted({f"{f.code} {f.subject}" for f in caught.value.findings})


def test_a_good_export_starts(export: Path, target: Path) -> None:
    strict.check_launch(str(export), str(target), RELEASE)
    assert os.environ[strict._CHECKED] == str(export)
    strict.check_launch(None, str(target), RELEASE)
    strict.check_launch("nobody/nothing", str(target), RELEASE)


def test_a_flipped_bit_is_refused_and_off_is_off(
    export: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray((export / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (export / "model.safetensors").write_bytes(data)
    assert refused(export, target) == ["file-changed model.safetensors"]
    monkeypatch.setenv(strict.STRICT, "off")
    strict.check_launch(str(export), str(target), RELEASE)


def test_another_target_is_refused_unless_allowed(
    export: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = target / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # its norm
    weights.write_bytes(data)
    assert refused(export, target) == ["target-differs target norm"]
    monkeypatch.setenv(strict.ALLOW, "target-differs, norm-before-residual")
    strict.check_launch(str(export), str(target), RELEASE)
    monkeypatch.setenv(strict.ALLOW, "file-changed")
    with pytest.raises(SpecExportError, match="cannot be allowed"):
        strict.check_launch(str(export), str(target), RELEASE)


def test_only_what_is_taken_from_the_target_is_hashed(
    export: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_export.artifact.target import Role, Target

    hashed: list[str] = []
    digest = Target.digest

    def note(self: Target, role: Role) -> str | None:
        hashed.append(role)
        return digest(self, role)

    monkeypatch.setattr(Target, "digest", note)
    strict.check_launch(str(export), str(target), RELEASE)
    assert sorted(hashed) == ["embedding", "norm"]


def test_drafts_of_others_are_checked_only_with_on(
    export: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (export / MANIFEST_NAME).unlink()
    config = export / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    strict.check_launch(str(export), str(target), RELEASE)
    monkeypatch.setenv(strict.STRICT, "on")
    assert "activation-unsupported hidden_act" in refused(export, target)


def test_a_release_that_is_too_old_or_unknown(
    export: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = refused(export, target, "0.4.5")
    assert "release-too-old architectures" in old
    strict.check_launch(str(export), str(target), "a build of our own")
    assert "calls itself a build of our own" in caplog.text


def test_settings_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(strict.STRICT, "yes")
    with pytest.raises(SpecExportError, match="none of auto, on, off"):
        strict.mode()
    monkeypatch.setenv(strict.STRICT, "")
    assert strict.mode() == "auto"
    assert strict.MANIFEST == MANIFEST_NAME


def test_an_internal_error_stops_the_server_only_with_on(
    export: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Arguments:
        speculative_draft_model_path = str(export)
        model_path = str(target)

    def fail(*args: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(strict, "check_launch", fail)
    plugin._check_launch(None, Arguments())
    assert "could not check the draft (KeyError: 'a bug')" in caplog.text
    monkeypatch.setenv(strict.STRICT, "on")
    with pytest.raises(KeyError):
        plugin._check_launch(None, Arguments())


# --- the plug-in -------------------------------------------------------------------


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """A package with one module, which nobody has imported."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "waited_for.inner", folder
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.startswith("waited_for")]:
        del sys.modules[name]


def test_a_module_is_changed_once_somebody_imports_it(
    package: tuple[str, Path],
) -> None:
    name, folder = package
    seen: list[int] = []

    def double(module: ModuleType) -> None:
        seen.append(module.value)
        module.value = 2  # type: ignore[attr-defined]

    finders = list(sys.meta_path)
    plugin.when_imported(name, double)
    assert name not in sys.modules and seen == []
    module = importlib.import_module(name)
    assert seen == [1] and module.value == 2
    assert sys.meta_path == finders
    assert module.__spec__ is not None
    assert module.__spec__.origin == str(folder / "inner.py")
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    plugin.when_imported(name, lambda module: seen.append(module.value))
    assert seen == [1, 2]  # it was there already


def test_a_failure_is_one_warning(
    package: tuple[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    name, _ = package

    def fail(module: ModuleType) -> None:
        raise ImportError("no such layer")

    plugin.when_imported(name, fail)
    with caplog.at_level(logging.WARNING):
        module = importlib.import_module(name)
    assert module.value == 1
    (record,) = caplog.records
    assert "waited_for.inner was left as it is" in record.getMessage()
    assert "no such layer" in record.getMessage()


def test_an_sglang_without_hooks_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    finders = list(sys.meta_path)
    plugin.register()  # there is no SGLang in this environment
    (record,) = caplog.records
    assert "nothing was registered" in record.getMessage()
    assert sys.meta_path == finders


def test_an_old_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = ModuleType("registry")
    models: dict[str, object] = {"Other": object}
    registry.ModelRegistry = SimpleNamespace(models=models)  # type: ignore[attr-defined]
    registry.import_model_classes = (  # type: ignore[attr-defined]
        lambda package, strict: {package: strict}
    )
    sglang = ModuleType("sglang")
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    for version in ("0.5.11", "0.5.11.post1"):
        sglang.__version__ = version  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"SGLang >= 0\.5\.12"):
            plugin._add_models(registry)
        assert models == {"Other": object}
    for version in ("0.5.12", "0.6.0.dev1", "main"):
        sglang.__version__ = version  # type: ignore[attr-defined]
        models.pop("spec_export.serving.models", None)
        plugin._add_models(registry)
        assert models == {"Other": object, "spec_export.serving.models": True}


def test_the_entry_point_imports_nothing_heavy() -> None:
    """Every process of every SGLang server with the package pays for it."""
    code = (
        "import sys, spec_export.serving.plugin as p; "
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'sglang'} & set(sys.modules); "
        "assert not heavy, heavy; assert callable(p.register)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
