"""The plug-in in the real SGLang: exact where the stock class is not, and strict.

The package is installed into a folder of its own beside SGLang, as `pip install
spec-export` does on a server, and found there by its entry point.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_export.judge.reference.eagle3 import Eagle3Reference
from tests.helpers.record import record
from tests.serving import drafts, plugin_drafts, simulate
from tests.serving.conftest import Made, MakePlugin, make_draft
from tests.serving.plugin_drafts import (
    BIASED,
    DEFAULT,
    EACH,
    PLUGIN_OFF,
    SINGLE,
    UNIFORM,
    WINDOW,
    WINDOWED,
    PluginEngine,
    PluginVariant,
)
from tests.serving.simulate import NEW_TOKENS, Continuation, Rounds, accept_length

ALL = [
    *(pytest.param(v, id=v.name) for v in (DEFAULT, BIASED, SINGLE)),
    *(pytest.param(v, id=v.name, marks=pytest.mark.wide) for v in EACH),
]


def histograms(answer: dict[str, Any]) -> list[list[int]]:
    assert "error" not in answer, f"{answer['error']}\n{answer['log'][-3000:]}"
    return [prompt["histogram"] for prompt in answer["prompts"]]


def served_length(found: list[list[int]]) -> float:
    accepted = sum(n * count for h in found for n, count in enumerate(h))
    return 1 + accepted / sum(map(sum, found))


def equal(found: list[list[int]], rounds: list[Rounds]) -> int:
    """Of how many prompts the histogram is the expected one."""
    return sum(h == r.histogram for h, r in zip(found, rounds, strict=True))


@pytest.mark.parametrize("variant", ALL)
def test_plugin_matches_training(
    variant: PluginVariant,
    make_plugin: MakePlugin,
    server: PluginEngine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    table: list[tuple[str, ...]],
    tmp_path: Path,
) -> None:
    made = make_plugin(variant)
    manifest = json.loads((made.export / plugin_drafts.MANIFEST).read_text())
    assert manifest["serving"]["requires_plugin"] is True
    assert "--speculative-draft-window-size" not in manifest["serving"]["launch"]
    answer = server.attempt(target, made.export, prompts, NEW_TOKENS)
    found = histograms(answer)
    stock = plugin_drafts.as_stock(made.export, tmp_path / "stock")
    stock_found = histograms(server.attempt(target, stock, prompts, NEW_TOKENS))
    rounds = sum(
        prompt["rounds"] == len(expected.accepted)
        for prompt, expected in zip(answer["prompts"], made.rounds, strict=True)
    )
    same, stock_same = equal(found, made.rounds), equal(stock_found, made.rounds)
    table.append(
        (
            variant.name,
            f"{made.judged:.1e}",
            f"{rounds}/{len(found)}",
            f"{same}/{len(found)} (stock class {stock_same}/{len(found)})",
            f"{served_length(found):.3f} ({served_length(stock_found):.3f})",
            f"{accept_length(made.rounds):.3f}",
            f"{accept_length(made.oracle):.3f}",
        )
    )
    record("judge", variant.name, f"{made.judged:.1e}")
    record("engine", variant.name, f"{same}/{len(found)}")
    tokens = [prompt["output_ids"] for prompt in answer["prompts"]]
    assert tokens == [text.new_tokens for text in texts]
    assert rounds == same == len(found)
    if variant.stock:
        assert stock_same == len(found)
    else:
        assert stock_same <= 1
        assert served_length(stock_found) < served_length(found) - 0.1


@pytest.mark.parametrize(
    "window", [WINDOW, pytest.param(8, marks=pytest.mark.wide)], ids=str
)
def test_window_of_one_layer(
    window: int,
    make_plugin: MakePlugin,
    server: PluginEngine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """As a server counts it, position by position.

    Training counts the window from the last token with features and lets a chain see
    its own steps besides. Step k of a chain therefore sees k keys more in training
    than in a server, at the far end of the window.
    """
    made = make_plugin(WINDOWED)

    def windowed(size: int) -> Path:
        out = tmp_path / str(size)
        shutil.copytree(
            made.export, out, ignore=shutil.ignore_patterns(plugin_drafts.MANIFEST)
        )
        config = json.loads((out / "config.json").read_text())
        config["sliding_window"] = size
        (out / "config.json").write_text(json.dumps(config))
        return out

    export = windowed(window)
    found = histograms(server.attempt(target, export, prompts, NEW_TOKENS))
    assert equal(found, plugin_drafts.served_rounds(export, target, texts)) == 6
    draft = simulate.load_draft(made.checkpoint)
    draft.sliding_window = window
    trained = equal(found, simulate.simulate(draft, texts))
    print(f"window {window}: {trained} of 6 prompts as in training")
    if window == WINDOW:
        record("judge", WINDOWED.name, f"{made.judged:.1e}")
        record("engine", WINDOWED.name, f"{trained}/6; as a server counts 6/6")
    assert trained >= 4
    # Without a window the draft is another one: it is there, and it is counted.
    full = histograms(server.attempt(target, windowed(64), prompts, NEW_TOKENS))
    assert full != found


def test_one_window_for_all_layers(
    server: PluginEngine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """By the stock class, from the flag that the manifest's launch line gives."""
    made = make_draft(UNIFORM, tmp_path, target, texts)
    serving = json.loads((made.export / plugin_drafts.MANIFEST).read_text())["serving"]
    assert serving["requires_plugin"] is False
    launch = serving["launch"]
    window = int(launch[launch.index("--speculative-draft-window-size") + 1])
    assert window == WINDOW - 1

    def served(size: int | None) -> list[list[int]]:
        extra = {"speculative_draft_window_size": size}
        answer = server.attempt(
            target, made.export, prompts, NEW_TOKENS, PLUGIN_OFF, **extra
        )
        return histograms(answer)

    found = served(window)
    expected = plugin_drafts.served_rounds(
        made.export, target, texts, Eagle3Reference, window
    )
    trained = equal(found, made.rounds)
    record("judge", UNIFORM.name, f"{made.judged:.1e}")
    record("engine", UNIFORM.name, f"{trained}/6; as a server counts 6/6")
    assert equal(found, expected) == 6
    # As in training but for a key or three at the far end of the window.
    assert served_length(found) == pytest.approx(accept_length(made.rounds), abs=0.05)
    # Without the flag it is another draft.
    assert served(None) != found


def test_stock_server_refuses(
    make_plugin: MakePlugin,
    server: PluginEngine,
    target: Path,
    prompts: list[list[int]],
) -> None:
    export = make_plugin(DEFAULT).export
    answer = server.attempt(target, export, prompts, NEW_TOKENS, PLUGIN_OFF)
    assert "error" in answer
    assert "'SpecExportEagle3ForCausalLM' is not a registered model" in answer["log"]


def test_server_without_our_drafts_is_the_same(
    make: Callable[[drafts.Variant], Made],
    server: PluginEngine,
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """With the package installed: no draft at all, and a draft of somebody else's."""
    made = make(drafts.SPREAD[0])
    other = plugin_drafts.as_stock(made.export, tmp_path / "other")
    for draft in (None, other):
        on = server.attempt(target, draft, prompts, NEW_TOKENS)
        off = server.attempt(target, draft, prompts, NEW_TOKENS, PLUGIN_OFF)
        assert "error" not in on, on["error"]
        assert on["prompts"] == off["prompts"]
        tokens = [prompt["output_ids"] for prompt in on["prompts"]]
        assert tokens == [text.new_tokens for text in texts]
        assert "spec-export" not in on["log"]
