"""The tiny target and its data, made once per machine, and trainings with them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "recipes" / "make_tiny_target.py"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Tiny:
    """What ``make_tiny_target.py`` made.

    Attributes:
        root: The folder of it all.
        target: Model folder of the target.
        data: speculators' dataset with hidden states.
    """

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def flags(self, save_path: Path, *more: str) -> list[str]:
        """Flags of a servable EAGLE-3 training of a few steps per epoch."""
        return [
            *("--verifier-name-or-path", str(self.target)),
            *("--data-path", str(self.data)),
            *("--save-path", str(save_path)),
            *("--log-dir", str(save_path.parent / "logs")),
            *("--draft-vocab-size", "128"),
            *("--total-seq-len", "256"),
            *("--full-attention-indices", "0"),
            *("--on-missing", "raise"),
            *("--lr", "3e-3"),
            *("--epochs", "1"),
            *("--log-freq", "1000"),
            "--no-norm-before-residual",
            *more,
        ]

    def shipped(self, name: str, root: Path) -> dict[str, Any]:
        """A recipe that we ship, for this data, writing below ``root``."""
        text = (REPOSITORY / "recipes" / f"{name}.yaml").read_text()
        content: dict[str, Any] = yaml.safe_load(text)
        train = content["train"]
        train["verifier"]["verifier_name_or_path"] = str(self.target)
        train["data"]["data_path"] = str(self.data)
        train["trainer"]["save_path"] = str(root / "run")
        (callback,) = content["callbacks"]
        callback["init_args"]["output_dir"] = str(root / "exports")
        return content


def make_tiny(rows: int = 64, length: int = 48) -> Tiny:
    """The tiny target and ``rows`` sequences of at most ``length`` tokens.

    Made in a subprocess and kept in the temporary folder of the machine, under a
    digest of the script, so that a second test run finds it.
    """
    digest = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]
    name = f"spec-export-tiny-{os.getuid()}-{digest}-{rows}x{length}"
    root = Path(tempfile.gettempdir()) / name
    if not root.is_dir():
        partial = Path(tempfile.mkdtemp(prefix=f"{name}."))
        subprocess.run(
            [
                *(sys.executable, str(SCRIPT), str(partial)),
                *("--rows", str(rows), "--length", str(length)),
            ],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=240,
        )
        try:
            partial.rename(root)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return Tiny(root)


def launched(
    *words: str, seconds: float = 280, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a launcher's module; all that is asked for happens on the CPU."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=REPOSITORY,
        env={**os.environ, **ours, "CUDA_VISIBLE_DEVICES": "", **environ},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_training(flags: list[str], *callbacks: Any) -> None:
    """Train with speculators' own ``main`` and trainer, watched by callbacks."""
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from spec_export.training.cpu import adapt_flags, cpu_runtime, has_accelerator
    from spec_export.training.launch import trainer_with

    config = TrainConfig.resolve(flags)
    with contextlib.ExitStack() as stack:
        trainer_class = cli.Trainer
        if not has_accelerator():
            adapt_flags(config)
            trainer_class = stack.enter_context(cpu_runtime())
        stack.enter_context(trainer_with(callbacks, trainer_class))
        cli.main(config)
