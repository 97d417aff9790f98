"""The manifest: what an export is, where each tensor comes from, how to serve it.

``spec_export_manifest.json`` lies beside the weights; the part known before the
first byte of weights is embedded in them too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import rfc8785
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spec_export.artifact.disk import read_regular, write_file
from spec_export.artifact.privacy import scrub, scrub_recipe
from spec_export.findings import SpecExportError, error

SCHEMA = "urn:spec-export:manifest:v1"
MANIFEST_NAME = "spec_export_manifest.json"
METADATA_KEY = "spec_export.manifest"
# Written before the weights, so the weights' header can carry it.
EMBEDDED = (
    "schema",
    "run_id",
    "serving",
    "tensors",
    "provided_by_target",
    "dropped",
    "config_changes",
    "vocab",
)
# Numbers beyond it are not exact in every JSON reader (RFC 8785).
_EXACT = 2**53 - 1
_AGAIN = "copy the export again"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RoleName = Literal["trained", "frozen", "derived", "buffer"]
Counterpart = Literal["embedding", "head", "norm"]


class _Part(BaseModel):
    """A reader ignores keys that it does not know: minor versions add some."""

    model_config = ConfigDict(
        extra="ignore",
        populate_by_name=True,
        serialize_by_alias=True,
        validate_assignment=True,
    )


class FileEntry(_Part):
    """Digest and size; exactly these keys, SGLang's model_file_verifier reads it."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0)]


class Serving(_Part):
    """How SGLang serves the export; ``launch`` has {draft} and {target} in it."""

    runtime: Literal["sglang"] = "sglang"
    min_version: str
    reasons: list[str] = []
    max_known_version: str
    algorithm: str
    architecture: str
    requires_plugin: bool
    launch: list[str]
    notes: list[str] = []


class TargetDigests(_Part):
    """SHA-256 of the target's raw tensors; null where its weights were not there."""

    embedding: Sha256 | None = None
    head: Sha256 | None = None
    norm: Sha256 | None = None


class TargetModel(_Part):
    """The model whose decoding is sped up; null where its config was not there."""

    name: str | None = None
    revision: str | None = None
    architectures: list[str] | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    head: Literal["own", "tied", "packed"] | None = None
    digests: TargetDigests = TargetDigests()


class TensorEntry(_Part):
    """One tensor of the export."""

    role: RoleName | None
    source: list[str]
    transform: str | None = None
    declared_trainable: bool | None = None
    in_optimizer: bool | None = None
    changed_in_training: bool | None = None
    equals_target: bool | None = None
    vocab_axis: int | None = None
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]
    sha256: Sha256


class Provided(_Part):
    """A serving parameter that SGLang takes from the target.

    ``sha256`` and ``role`` are of what training used in its place.
    """

    name: str
    shape: list[int]
    dtype: str | None = None
    sha256: Sha256 | None = None
    role: RoleName | None = None
    counterpart: Counterpart


class Dropped(_Part):
    """A source tensor that was not exported."""

    name: str
    shape: list[int]
    reason: str


class ConfigChangeEntry(_Part):
    """A value of config.json that is not the source's."""

    key: str
    from_: Any = Field(default=None, alias="from")
    to: Any = None
    rule: str


class Vocab(_Part):
    """The draft's vocabulary and its map to the target's."""

    draft_size: int | None = None
    target_size: int | None = None
    encoding: Literal["offset"] | None = None
    digests: dict[str, Sha256] = {}


class Leg(_Part):
    """One leg of the forward comparison."""

    ran: bool
    reason: str | None = None
    device: str | None = None
    dtype: str | None = None
    positions: int | None = None
    steps: int | None = None
    metrics: Any = None
    free_running: Any = None
    acceptance: dict[str, float] | None = None
    tolerance: Any = None
    verdict: str | None = None
    diagnosis: list[str] = []
    notes: list[str] = []
    seconds: float | None = None
    prompts: Any = None
    sglang: str | None = None


class Training(_Part):
    """Where the weights come from."""

    speculators_version: str | None = None
    global_step: int | None = None
    epoch: int | None = None
    metrics: dict[str, Any] = {}
    recipe: dict[str, Any] | None = None
    recipe_digest: str | None = None
    packages: dict[str, str] = {}


class Deviation(_Part):
    """A difference from what was trained that the user accepted."""

    code: str
    detail: str
    allowed_by: str


class FindingEntry(_Part):
    """A finding of the run that wrote the export."""

    code: str
    severity: Literal["error", "warning", "info"]
    subject: str
    message: str
    hint: str | None = None


class Manifest(_Part):
    """The whole manifest; ``schema_`` is the key ``schema``."""

    schema_: Annotated[str, Field(pattern=r"^urn:spec-export:manifest:v1$")] = Field(
        default=SCHEMA, alias="schema"
    )
    run_id: str
    status: Literal["saved", "final", "failed"]
    files: dict[str, FileEntry] = {}
    serving: Serving
    target_model: TargetModel = TargetModel()
    tensors: dict[str, TensorEntry]
    provided_by_target: list[Provided] = []
    dropped: list[Dropped] = []
    config_changes: list[ConfigChangeEntry] = []
    vocab: Vocab = Vocab()
    comparison: dict[str, Leg] = {}
    training: Training = Training()
    deviations: list[Deviation] = []
    findings: list[FindingEntry] = []

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read the manifest of an export folder.

        Raises:
            SpecExportError: exit 1, ``manifest-missing`` or ``manifest-invalid``.
        """
        path = Path(folder) / MANIFEST_NAME
        try:
            return cls.from_bytes(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            raise SpecExportError(
                [
                    error(
                        "manifest-missing",
                        MANIFEST_NAME,
                        f"{path.parent} has no {MANIFEST_NAME}",
                        "is this the folder of an export?",
                    )
                ]
            ) from None
        except OSError as problem:
            raise _invalid(f"it cannot be read: {problem.strerror}") from problem

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            SpecExportError: exit 1, ``manifest-invalid``, naming the first field.
        """
        try:
            content = json.loads(data)
            schema = content["schema"] if isinstance(content, dict) else None
        except KeyError as problem:
            raise _invalid("it is no manifest: no field 'schema'", _AGAIN) from problem
        except (ValueError, RecursionError) as problem:
            raise _invalid(f"it is no manifest: {problem}", _AGAIN) from problem
        if schema != SCHEMA:
            raise _invalid(
                f"its schema is {schema!r}, this release reads {SCHEMA}",
                "read it with the release of spec-export that wrote it",
            )
        try:
            return cls.model_validate(content)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _invalid(f"{where}: {first['msg']}") from problem

    def to_json(self) -> dict[str, Any]:
        """As plain data, without private facts, as it is written."""
        content = self.model_dump(mode="python")
        recipe = content["training"]["recipe"]
        content["training"]["recipe"] = None if recipe is None else scrub_recipe(recipe)
        return scrub(content)

    def to_bytes(self) -> bytes:
        """Canonical JSON (RFC 8785) and nothing private in it."""
        return canonical_json(self.to_json())

    def write(self, folder: str | Path) -> None:
        """Write it into a staging folder; the last file to be written there.

        Raises:
            SpecExportError: exit 2, ``disk-full``.
        """
        write_file(Path(folder) / MANIFEST_NAME, self.to_bytes())


def embedded_json(manifest: Manifest) -> str:
    """The part of a manifest that is known before the weights are written.

    Status, files, comparison and findings are left out, so that finishing an
    export rewrites no weights.
    """
    content = manifest.to_json()
    return canonical_json({key: content[key] for key in EMBEDDED}).decode()


def weights_metadata(manifest: Manifest) -> dict[str, str]:
    """``__metadata__`` of each weight file; transformers insists on ``format``."""
    return {"format": "pt", METADATA_KEY: embedded_json(manifest)}


def canonical_json(content: Any) -> bytes:
    """RFC 8785 bytes of plain data.

    NaN and infinity become null, integers that JSON readers round become strings.
    """
    return rfc8785.dumps(_plain(content))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):  # a numpy scalar
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) <= _EXACT else str(value)
    if value is None or isinstance(value, bool):
        return value
    return _text(str(value))  # also dates that YAML reads from a recipe


def _text(value: str) -> str:
    """A string that has a UTF-8 form; JSON's escapes can make half a character."""
    return value.encode("utf-8", "replace").decode()


def json_schema() -> dict[str, Any]:
    """The JSON schema of the manifest, as in ``ckpt_templates/``."""
    schema = Manifest.model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        **schema,
        "required": sorted({*schema["required"], "schema"}),
    }


def _invalid(why: str, hint: str | None = None) -> SpecExportError:
    return SpecExportError([error("manifest-invalid", MANIFEST_NAME, why, hint)])
