"""Joins sources and exports with the judge: who is compared with whom, on which device.

torch is imported inside the functions, after ``require`` has said what is missing.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_export.artifact.header import read_header
from spec_export.artifact.manifest import METADATA_KEY
from spec_export.artifact.source import Source
from spec_export.artifact.target import Target
from spec_export.findings import usage_error
from spec_export.judge.verdict import Leg, not_run
from spec_export.layout.releases import engine_setup, newest_known

if TYPE_CHECKING:
    import torch

POSITIONS = 256
WINDOW_FLAG = "--speculative-draft-window-size"
STEPS = 3


def require(*packages: str, hint: str = "or --no-compare") -> None:
    """Say which packages a comparison needs and lacks.

    Args:
        packages: Those needed besides torch.
        hint: What to do instead of installing them.

    Raises:
        SpecExportError: exit 2, ``dependency-missing``.
    """
    missing = [
        name for name in ("torch", *packages) if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise usage_error(
            "dependency-missing",
            "--compare",
            f"the forward comparison needs {', '.join(missing)}, not installed here",
            f'pip install "spec-export[train]", {hint}',
        )


def choose_device(device: str) -> str:
    """``auto`` is CUDA where there is one.

    Raises:
        SpecExportError: exit 2 for ``cuda`` without a CUDA device.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise usage_error(
            "option-invalid", "--device", f"{device!r}", "one of auto, cpu, cuda"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise usage_error(
            "option-invalid", "--device", "cuda: no CUDA device here", "--device cpu"
        )
    return device


def as_torch(array: np.ndarray) -> torch.Tensor:
    """A numpy array (ml_dtypes' bfloat16 included) as a tensor of the same bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def judge_of_checkpoint(
    source: Source,
    target: Target | None,
    device: str,
    release: str | None,
    positions: int = POSITIONS,
    steps: int = STEPS,
) -> Callable[[Path], Mapping[str, Leg]]:
    """The comparison of a checkpoint, to be run on a staging folder.

    speculators' own class is filled from the checkpoint, rounded to the dtype of the
    export; the serving reference reads the folder alone. The folder gets a probe.
    """
    place = choose_device(device)

    def judge(folder: Path) -> Mapping[str, Leg]:
        from spec_export.judge import training_module
        from spec_export.judge.engine.side import of_module
        from spec_export.judge.inputs import Inputs
        from spec_export.judge.parts import round_as_saved
        from spec_export.judge.run import layout_leg

        lent = borrowed(source, target)
        if (why := not_at_hand(source, lent)) is not None:
            return {"layout": not_run("layout", why)}
        module = training_module(
            source.config,
            lambda name: lent[name] if name in lent else as_torch(source.read(name)),
            [*source.tensors, *lent],
            saved_dtype=saved_dtype_of(folder),
            device=place,
        )
        # Without the target at hand the serving side gets what training used.
        served = target.path if target is not None and _readable(target) else None
        own: Any = module.get_parameter("embed_tokens.weight")
        layout = layout_leg(
            folder,
            module,
            Inputs.for_config(source.config, positions=positions),
            target=served,
            target_config=target.config if target is not None else None,
            embed=own if served is None else None,
            release=release or newest_known(),
            window=window_of(folder),
            device=place,
            steps=steps,
            write_probe=True,
        )
        engine = not_run("engine", "the leg layout has not passed")
        if layout.passed:
            about = target.config if target is not None else None
            round_as_saved(module, about, saved_name_of(folder))
            engine = _engine(folder, lambda: of_module(module), target, place)
        return {
            "cast": not_run("cast", "a checkpoint has no live module any more"),
            "layout": layout,
            "engine": engine,
        }

    return judge


def engine_of_export(
    folder: Path, target: Target | None, device: str, release: str | None
) -> Leg:
    """Leg 3 of an export, whose leg *layout* has passed; needs no speculators.

    SGLang's rules, which that leg held against training, say what is expected.
    """
    from spec_export.judge.engine.side import Side, of_reference
    from spec_export.judge.parts import open_reference
    from spec_export.judge.stored_probe import load_probe

    place, rules = choose_device(device), release or newest_known()

    def side() -> Side | Leg:
        import torch

        assert target is not None
        window = window_of(folder)
        reference = open_reference(
            *(folder, target.path, None, None, rules, place, window, torch.float32),
            target.config,
        )
        if isinstance(reference, Leg):
            return not_run("engine", reference.reason)
        return of_reference(reference, load_probe(folder).layers)

    return _engine(folder, side, target, place)


def _engine(
    folder: Path, side: Callable[[], Any], target: Target | None, device: str
) -> Leg:
    """Leg 3, the real SGLang, where one is found that can run; else the reason why.

    Args:
        folder: The export.
        side: Gives what the rounds should be, or the leg that says why not.
        target: The target.
        device: ``cpu`` or ``cuda``.
    """
    from spec_export.judge.engine import host

    python = host.sglang_python()
    if python is None:
        return not_run("engine", host.why_none())
    if target is None or not target.has_weights:
        return not_run("engine", "the target's weights are needed: --target DIR")
    parts = (target.config, target.text_config)
    if any(part.get("quantization_config") is not None for part in parts):
        why = "the target is quantised, which transformers and SGLang compute apart"
        return not_run("engine", why)
    if target.vocab_size is None:
        return not_run("engine", "the target's configuration has no vocab_size")

    from spec_export.judge.engine.leg import engine_leg, failed_to_run

    try:
        sglang = host.examine(python)
        found = side()
        if isinstance(found, Leg):
            return found
        return engine_leg(
            folder,
            found,
            sglang,
            target=target.path,
            serving=serving_of(folder),
            setup=host.Setup(**engine_setup(device)),
            vocab_size=target.vocab_size,
        )
    except host.EngineFailed as problem:
        why = f"SGLang cannot be asked: {problem}; {host.PYTHON_VARIABLE} names it"
        return failed_to_run(why)
    except OSError as problem:
        return failed_to_run(f"a temporary file of it: {problem.strerror}")


def layout_of_merged(
    source: Source, target: Target, folder: Path, device: str, release: str | None
) -> Leg:
    """An MTP checkpoint against a copy of its target that it was merged into."""
    from spec_export.judge import training_module
    from spec_export.judge.inputs import Inputs
    from spec_export.judge.run import layout_leg

    place = choose_device(device)
    lent = borrowed(source, target)
    module = training_module(
        source.config,
        lambda name: lent[name] if name in lent else as_torch(source.read(name)),
        [*source.tensors, *lent],
        device=place,
    )
    return layout_leg(
        folder,
        module,
        Inputs.for_config(source.config, positions=POSITIONS),
        target=target.path,
        release=release or newest_known(),
        window=window_of(folder),
        device=place,
        steps=STEPS,
    )


def leg_of_probe(
    folder: Path, target: Target | None, device: str, release: str | None
) -> Leg:
    """Leg 2 again, from the probe in an export; needs no speculators."""
    from spec_export.judge.run import probe_leg
    from spec_export.judge.stored_probe import load_probe

    if not _readable(target):
        return not_run("layout", "the target's embedding is needed: --target DIR")
    assert target is not None
    return probe_leg(
        folder,
        load_probe(folder),
        target=target.path,
        release=release or newest_known(),
        window=window_of(folder),
        device=choose_device(device),
    )


def serving_of(folder: Path) -> dict[str, Any]:
    """``serving`` of an export; empty where a broken manifest has its own findings.

    Read from the weights: when an export is judged, its manifest is not there yet.
    """
    first = min(folder.glob("*.safetensors"))
    embedded = read_header(first).metadata.get(METADATA_KEY)
    try:
        serving = json.loads(embedded or "")["serving"]
    except (ValueError, KeyError, TypeError):
        return {}
    return serving if isinstance(serving, dict) else {}


def window_of(folder: Path) -> int | None:
    """The window that the launch line of an export gives the draft, in tokens."""
    try:
        launch = serving_of(folder)["launch"]
        return int(launch[launch.index(WINDOW_FLAG) + 1])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None  # no such flag


def saved_dtype_of(folder: Path) -> Any:
    """The float dtype of an export."""
    import torch

    return getattr(torch, saved_name_of(folder))


def saved_name_of(folder: Path) -> str:
    """The float dtype of an export by name, for example ``bfloat16``."""
    return str(json.loads((folder / "config.json").read_text())["dtype"])


def _readable(target: Target | None) -> bool:
    return (
        target is not None
        and target.find("embedding") is not None
        and target.packed("embedding") is None
    )


def not_at_hand(source: Source, lent: Mapping[str, Any]) -> str | None:
    """Why a slim source cannot be compared, if neither it nor the target has all."""
    shared = {"embed_tokens.weight", "lm_head.weight"}
    missing = sorted(shared - set(source.tensors) - set(lent))
    if not missing:
        return None
    said = f"{', '.join(missing)} of training are the target's"
    return f"{said}, unquantised: --target DIR"


def borrowed(source: Source, target: Target | None) -> dict[str, torch.Tensor]:
    """What a slim checkpoint leaves to the target: training used the target's."""
    from spec_export.artifact.values import target_ids

    out: dict[str, torch.Tensor] = {}
    if target is None or not target.has_weights:
        return out
    if "embed_tokens.weight" not in source.tensors and not target.packed("embedding"):
        out["embed_tokens.weight"] = as_torch(target.read("embedding"))
    if "lm_head.weight" not in source.tensors and not target.packed("head"):
        rows = target_ids(source.read("d2t")) if "d2t" in source.tensors else None
        out["lm_head.weight"] = as_torch(target.read("head", rows))
    return out
