"""The probe that travels with an export, in its folder ``probe/``.

Inputs (a seed where they are random) and, of the training side's logits, what is
enough to see a difference anywhere in the vocabulary and small enough to ship: the
largest ones, the sum of all in log space, and eight random projections.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from spec_export.findings import SpecExportError, error
from spec_export.judge.inputs import Inputs
from spec_export.judge.seeded import digest, uniform
from spec_export.judge.verdict import StepMetrics, Tolerance

SCHEMA = "urn:spec-export:probe:v1"
FOLDER = "probe"
_TOP = 64
_PROJECTIONS = 8
_ROWS = ("token_ids", "position_ids", "document_ids")
# A probe is data that others can edit: its tolerance is believed up to what honest
# runs measured in that dtype (of the logit range, and in nats).
BELIEVED = {"float32": (1e-3, 1e-3)}
_BELIEVED_NARROW = (0.1, 0.1)


@dataclass(frozen=True)
class Probe:
    """What a deployer needs to repeat the layout leg without speculators.

    Attributes:
        inputs: The rows.
        steps: Chained draft steps.
        top_ids: [steps, N, k] int64, the largest logits of each compared row.
        top_values: [steps, N, k] float32.
        log_sums: [steps, N] float64, log of the summed exponentials.
        projections: [steps, N, 8] float64.
        ranges: [steps] largest minus smallest logit.
        hot_ids_digest: SHA-256 of the target id of each draft id, int64.
        tolerance: The one of the run that wrote the probe.
        metadata: What else the writer recorded.
        dtype: Of the computation that gave the logits.
        layers: After which layers of the target training took its features.
        top_k: Candidates of a block draft's selector, 0 without one; None: not known.
    """

    inputs: Inputs
    steps: int
    top_ids: torch.Tensor
    top_values: torch.Tensor
    log_sums: torch.Tensor
    projections: torch.Tensor
    ranges: torch.Tensor
    hot_ids_digest: str
    tolerance: Tolerance
    metadata: Mapping[str, Any]
    dtype: str = "float32"
    layers: list[int] | None = None
    top_k: int | None = None

    def believed(self) -> Tolerance:
        """The recorded tolerance, cut where it allows more than an honest one."""
        rel, kl = BELIEVED.get(self.dtype, _BELIEVED_NARROW)
        given = self.tolerance
        if given.max_rel <= rel and given.max_kl <= kl:
            return given
        source = f"{given.source}; the probe's {given.max_rel:.2e} is not believed"
        return Tolerance(min(given.max_rel, rel), source, min(given.max_kl, kl))

    def compare(self, serving: Sequence[torch.Tensor]) -> tuple[StepMetrics, ...]:
        """Metrics per step against logits [T, vocabulary] of the serving side.

        ``max_abs`` is over the stored logits, log sums and projections; the KL is
        that of the stored tokens and the rest as one, a lower bound of the full one.
        """
        rows = self.inputs.rows()
        return tuple(
            self._compare_step(step, logits[rows.to(logits.device)])
            for step, logits in enumerate(serving)
        )

    def _compare_step(self, step: int, serving: torch.Tensor) -> StepMetrics:
        ids, values = self.top_ids[step], self.top_values[step].double()
        found = _condensed(serving, ids)
        apart = torch.cat(
            [
                (found.values - values).abs(),
                (found.log_sums - self.log_sums[step])[:, None].abs(),
                (found.projections - self.projections[step]).abs(),
            ],
            1,
        ).nan_to_num(math.inf)
        p = (values - self.log_sums[step][:, None]).exp()
        q = (found.values - found.log_sums[:, None]).exp()
        rest_p, rest_q = (1 - p.sum(1)).clamp(1e-12), (1 - q.sum(1)).clamp(1e-12)
        kl = (p * (p.clamp(1e-300).log() - q.clamp(1e-300).log())).sum(1)
        kl = (kl + rest_p * (rest_p / rest_q).log()).clamp(min=0).nan_to_num(math.inf)
        worst = int(kl.argmax())
        # The stored range is data as well; right logits have the same one here.
        here = float(serving.max() - serving.min())
        spread = max(min(float(self.ranges[step]), here), 1e-300)
        return StepMetrics(
            step=step,
            max_abs=apart.max().item(),
            max_rel=apart.max().item() / spread,
            kl_mean=kl.mean().item(),
            kl_max=kl[worst].item(),
            kl_max_position=int(self.inputs.rows()[worst]),
            top1=(found.best == ids[:, 0]).double().mean().item(),
        )


@dataclass(frozen=True)
class _Condensed:
    values: torch.Tensor
    log_sums: torch.Tensor
    projections: torch.Tensor
    best: torch.Tensor


def _condensed(logits: torch.Tensor, ids: torch.Tensor) -> _Condensed:
    """What the probe keeps of logits [N, V], for given token ids [N, k]."""
    vocab = logits.shape[-1]
    signs = (uniform(vocab * _PROJECTIONS, 11) < 0.5).double() * 2 - 1
    signs = signs.view(vocab, _PROJECTIONS) / math.sqrt(vocab)
    parts = [
        (c.cpu().double(), i)
        for c, i in zip(logits.split(64), ids.split(64), strict=True)
    ]
    return _Condensed(
        torch.cat([rows.gather(1, i) for rows, i in parts]),
        torch.cat([rows.logsumexp(1) for rows, _ in parts]),
        torch.cat([rows @ signs for rows, _ in parts]),
        torch.cat([rows.argmax(1) for rows, _ in parts]),
    )


def save_probe(
    folder: Path,
    inputs: Inputs,
    logits: Sequence[torch.Tensor],
    *,
    hot_ids: torch.Tensor,
    tolerance: Tolerance,
    layers: Sequence[int] | None = None,
    top_k: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write ``folder/probe/``, which whoever gets the export can read.

    Rows that are recorded from a batch of training are left out where rows of a seed
    stand beside them: their token ids are text of the training data, and so are, to
    whoever has the target, their features. Rows that are all recorded are stored as
    they are; only a caller who wants that hands over such.

    Args:
        folder: The export.
        inputs: The rows that were run.
        logits: Training side, per step [T, vocabulary].
        hot_ids: Target id of each draft id, int64 (``probe.target_ids``).
        tolerance: What the layout leg allowed.
        layers: After which layers of the target training took its features.
        top_k: Candidates of a block draft's selector; 0 without one.
        metadata: JSON values to keep beside, for example versions.

    Returns:
        The files written, relative to ``folder``.
    """
    travelling = inputs.seeded()
    logits = [step[len(inputs) - len(travelling) :] for step in logits]
    inputs = travelling
    rows = inputs.rows()
    top, condensed, ranges = [], [], []
    for step in logits:
        picked = step[rows.to(step.device)]
        top.append(picked.float().topk(min(_TOP, picked.shape[-1]), -1).indices.cpu())
        condensed.append(_condensed(picked, top[-1]))
        ranges.append((picked.max() - picked.min()).double().cpu())
    tensors = {
        "top_ids": torch.stack(top).int(),
        "top_values": torch.stack([c.values for c in condensed]).float(),
        "log_sums": torch.stack([c.log_sums for c in condensed]),
        "projections": torch.stack([c.projections for c in condensed]),
        "ranges": torch.stack(ranges),
    }
    described: dict[str, Any] = {"positions": len(inputs), "digest": _digest(inputs)}
    if inputs.seed is None:
        described["from"] = "stored"
        tensors |= {name: getattr(inputs, name) for name in _ROWS}
        tensors["aux"] = inputs.aux.to(torch.bfloat16)
    else:
        described |= {
            "from": "seed",
            "seed": inputs.seed,
            "vocab_size": inputs.vocab_size,
            "aux_width": inputs.aux.shape[1],
        }
    record = {
        "schema": SCHEMA,
        "steps": len(logits),
        "inputs": described,
        "hot_ids_digest": digest(hot_ids.long()),
        "tolerance": asdict(tolerance),
        "dtype": str(logits[0].dtype).removeprefix("torch."),
        "layers": None if layers is None else list(layers),
        "top_k": top_k,
        "metadata": dict(metadata or {}),
    }
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, place / "probe.safetensors")
    (place / "probe.safetensors").chmod(0o644)
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    (place / "probe.json").write_text(text)
    return [f"{FOLDER}/probe.json", f"{FOLDER}/probe.safetensors"]


def _digest(inputs: Inputs) -> str:
    parts = [digest(getattr(inputs, name)) for name in _ROWS]
    return ":".join([*(p[:16] for p in parts), digest(inputs.aux)])


def load_probe(folder: Path) -> Probe:
    """Read ``folder/probe/``.

    Raises:
        SpecExportError: ``file-missing`` without a probe, ``file-corrupt`` if it
            cannot be read or its inputs are not the ones recorded.
    """
    place = folder / FOLDER
    for name in ("probe.json", "probe.safetensors"):
        if not (place / name).is_file():
            hint = "finalize with --compare writes one"
            missing = error("file-missing", f"{FOLDER}/{name}", "no probe here", hint)
            raise SpecExportError([missing])
    try:
        record = json.loads((place / "probe.json").read_text())
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r}, not {SCHEMA!r}")
        tensors = load_file(place / "probe.safetensors")
        inputs = _inputs(record["inputs"], tensors)
        if _digest(inputs) != record["inputs"]["digest"]:
            raise ValueError("the inputs are not the ones that were recorded")
        _whole(record["steps"], len(inputs.rows()), tensors)
        return Probe(
            inputs=inputs,
            steps=record["steps"],
            top_ids=tensors["top_ids"].long(),
            top_values=tensors["top_values"],
            log_sums=tensors["log_sums"],
            projections=tensors["projections"],
            ranges=tensors["ranges"],
            hot_ids_digest=record["hot_ids_digest"],
            tolerance=Tolerance(**record["tolerance"]),
            metadata=record["metadata"],
            dtype=record.get("dtype", "float32"),
            layers=record.get("layers"),
            top_k=record.get("top_k"),
        )
    except (KeyError, TypeError, ValueError, SafetensorError) as problem:
        broken = error("file-corrupt", f"{FOLDER}/", f"the probe is broken: {problem}")
        raise SpecExportError([broken]) from problem


def _whole(steps: Any, rows: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every step and row that the probe speaks of is there, and there are some.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(steps, int) or steps < 1 or rows < 2:
        raise ValueError(f"{steps} steps of {rows} rows")
    for name in ("top_ids", "top_values", "log_sums", "projections"):
        if tuple(tensors[name].shape[:2]) != (steps, rows):
            found = list(tensors[name].shape)
            raise ValueError(
                f"{name} has the shape {found}: {steps} steps, {rows} rows"
            )
    if tensors["ranges"].shape != (steps,) or tensors["top_ids"].shape[2] < 1:
        raise ValueError("no logits of some step")


def _inputs(described: Mapping[str, Any], tensors: Mapping[str, Any]) -> Inputs:
    if described["from"] == "stored":
        rows = {name: tensors[name] for name in _ROWS}
        return Inputs(aux=tensors["aux"].float(), **rows)
    return Inputs.random(
        vocab_size=described["vocab_size"],
        aux_width=described["aux_width"],
        positions=described["positions"],
        seed=described["seed"],
    )
