"""Fixtures of the serving tests: a target, its drafts, their exports, one engine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from loguru import logger

from spec_export import cli
from tests.serving import drafts, plugin_drafts, simulate
from tests.serving.plugin_drafts import PluginEngine, PluginVariant
from tests.serving.sglang_process import PYTHON_VARIABLE, Engine, sglang_python
from tests.serving.simulate import Continuation

PROMPTS = 6
TABLE = pytest.StashKey[list[tuple[str, ...]]]()
HEAD = (
    "variant",
    "judge: max rel",
    "rounds equal",
    "histogram equal",
    "engine",
    "simulation",
    "oracle",
)


@dataclass(frozen=True)
class Made:
    """One variant: its checkpoint, its export, and what it should do in a server."""

    checkpoint: Path
    export: Path
    rounds: list[simulate.Rounds]
    oracle: list[simulate.Rounds]

    @property
    def judged(self) -> float:
        """The judge's largest difference, as a share of the logit range."""
        manifest = json.loads((self.export / "spec_export_manifest.json").read_text())
        return max(m["max_rel"] for m in manifest["comparison"]["layout"]["metrics"])


MakePlugin = Callable[[PluginVariant], Made]


def export_draft(checkpoint: Path, out: Path, target: Path, *more: str) -> None:
    """Make the export the way a person does, in fp32 for the engine on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON_VARIABLE, "")  # the tests run the engine themselves
        code = cli.run(
            [
                *("finalize", str(checkpoint), "--output", str(out)),
                *("--target", str(target), "--dtype", "float32"),
                *more,
            ]
        )
    assert code == 0, f"spec-export finalize {checkpoint.name} exits {code}"


def make_draft(
    variant: drafts.Variant,
    root: Path,
    target: Path,
    texts: list[Continuation],
    *more: str,
) -> Made:
    """Train, export and simulate a variant; ``more`` are options of ``finalize``."""
    checkpoint, export = root / variant.name, root / f"{variant.name}-export"
    drafts.make_checkpoint(variant, target, texts, checkpoint)
    export_draft(checkpoint, export, target, *more)
    draft = simulate.load_draft(checkpoint)
    return Made(
        checkpoint,
        export,
        simulate.simulate(draft, texts),
        simulate.oracle(draft, texts),
    )


def continuations(target: Path) -> list[Continuation]:
    """Prompts with a target's greedy continuations."""
    model = simulate.load_target(target)
    return [
        simulate.continue_greedily(model, prompt)
        for prompt in drafts.random_prompts(PROMPTS)
    ]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target."""
    logger.disable("speculators")  # some lines for every file it looks at
    folder = tmp_path_factory.mktemp("target") / "tiny-llama"
    drafts.make_target(folder)
    return folder


@pytest.fixture(scope="session")
def texts(target: Path) -> list[simulate.Continuation]:
    """The prompts with the target's greedy continuations."""
    return continuations(target)


@pytest.fixture(scope="session")
def prompts(texts: list[simulate.Continuation]) -> list[list[int]]:
    """Their token ids."""
    return [text.tokens[: text.prompt].tolist() for text in texts]


@pytest.fixture(scope="session")
def make(
    target: Path,
    texts: list[simulate.Continuation],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[drafts.Variant], Made]:
    """Trains, exports and simulates a variant, once per session."""
    root = tmp_path_factory.mktemp("drafts")

    @cache
    def made(variant: drafts.Variant) -> Made:
        return make_draft(variant, root, target, texts)

    return made


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SGLang with its imports done; drafts are served one after another."""
    with Engine(tmp_path_factory.mktemp("sglang") / "engine.log") as running:
        yield running


@pytest.fixture(scope="session")
def block_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same with what a CPU needs for block drafts."""
    log = tmp_path_factory.mktemp("sglang-block") / "engine.log"
    with Engine(log, {"SPEC_EXPORT_BLOCK_DRAFTS": "1"}) as running:
        yield running


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which SGLang finds the installed package."""
    return plugin_drafts.install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def server(
    installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PluginEngine]:
    """SGLang with the package installed beside it."""
    log = tmp_path_factory.mktemp("plugin") / "engine.log"
    with PluginEngine(log, installed) as running:
        yield running


@pytest.fixture(scope="session")
def make_plugin(
    target: Path,
    texts: list[Continuation],
    tmp_path_factory: pytest.TempPathFactory,
) -> MakePlugin:
    """Trains, exports and simulates a variant, once per session."""
    root = tmp_path_factory.mktemp("plugin-drafts")

    @cache
    def made(variant: PluginVariant) -> Made:
        how = "always" if variant.stock else "auto"
        return make_draft(variant, root, target, texts, "--plugin", how)

    return made


@pytest.fixture(scope="session")
def wheel() -> Callable[[str], Path]:
    """Another SGLang release as an unpacked wheel, kept in the temporary folder."""

    def unpacked(release: str) -> Path:
        name = f"spec-export-sglang-{os.getuid()}-{release}"
        folder = Path(tempfile.gettempdir()) / name
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f"{name}."))
            pip = [str(sglang_python()), "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run(
                [*pip, "--target", str(partial), f"sglang=={release}"],
                check=True,
                timeout=240,
            )
            partial.rename(folder)
        return folder

    return unpacked


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[tuple[str, ...]]:
    """Rows of the table that is printed at the end; columns as in ``HEAD``."""
    return pytestconfig.stash.setdefault(TABLE, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what the engine did beside what the training side said it would do."""
    rows = config.stash.get(TABLE, [])
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    terminalreporter.section("real engine and speculators' module: accept lengths")
    for row in (HEAD, *rows):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())
