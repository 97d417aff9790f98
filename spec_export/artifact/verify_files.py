"""Whether the files of an export are the ones that its manifest describes."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spec_export.artifact.disk import FileFact, hash_file
from spec_export.artifact.header import Header, read_header
from spec_export.artifact.manifest import (
    EMBEDDED,
    MANIFEST_NAME,
    METADATA_KEY,
    Manifest,
    canonical_json,
)
from spec_export.artifact.signals import undisturbed
from spec_export.artifact.weights import INDEX, read_index, stays_inside
from spec_export.findings import Finding, SpecExportError, error

# What SGLang's loader would take for weights if it lay in the folder.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")

# Read at the same time: hashing lets go of the interpreter, so that shards take the
# time of the slowest of disk and processors. A block of each is in memory.
_READERS = 4


def verify_files(folder: str | Path, manifest: Manifest) -> list[Finding]:
    """Compare an export folder with its manifest, byte for byte.

    Checked are each listed file (present, inside the folder, size, digest), files
    that SGLang would load and nobody lists, the index, and the weight headers
    against the manifest's tensors and the manifest embedded in them. A file is
    read once, a file of the wrong size not at all.

    Args:
        folder: The export.
        manifest: Its manifest.

    Returns:
        Error findings, one for each file or tensor; empty if all is well.
    """
    folder = Path(folder)
    problems = {
        name: _wrong_place(folder, name) or _wrong_size(folder / name, name, entry.size)
        for name, entry in sorted(manifest.files.items())
    }
    to_read = [name for name, problem in problems.items() if problem is None]
    for name, fact in zip(to_read, _facts(folder, to_read), strict=True):
        problems[name] = _wrong_bytes(name, fact, manifest.files[name].sha256)
    sound = [name for name, problem in problems.items() if problem is None]
    findings = [problem for problem in problems.values() if problem is not None]
    findings += _unlisted(folder, manifest)
    headers = _headers(folder, manifest, sound, findings)
    findings += _wrong_tensors(manifest, headers)
    findings += _wrong_embedded(manifest, headers)
    if INDEX in sound:
        findings += _wrong_index(folder, headers)
    return findings


def check_written(folder: Path, manifest: Manifest) -> None:
    """Open what was just written again: sizes, headers, the manifest itself.

    Digests are those of the bytes that were handed to the system; reading them back
    before a crash would only show its cache.

    Raises:
        SpecExportError: exit 1; it must not be published.
    """
    again = Manifest.read(folder)
    findings = []
    for name, entry in again.files.items():
        size = os.stat(folder / name).st_size
        if size != entry.size:
            what = f"it has {size} bytes, {entry.size} were written"
            findings.append(error("file-changed", name, what))
    headers = _headers(folder, again, list(again.files), findings)
    findings += _wrong_tensors(manifest, headers)
    findings += _wrong_embedded(manifest, headers)
    if findings:
        raise SpecExportError(findings)


def _wrong_place(folder: Path, name: str) -> Finding | None:
    if not stays_inside(name):
        return error(
            "path-escape", name, f"{MANIFEST_NAME} lists it, outside the folder"
        )
    path = folder / name
    if not path.is_file():
        return error(
            "file-missing",
            name,
            f"{MANIFEST_NAME} lists it, it is not there",
            "copy the export again",
        )
    real, home = path.resolve(), folder.resolve()
    inside = [home]
    if home.parent.name == "snapshots":
        # A hub cache holds links to files that are named by their digests.
        inside.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in inside):
        return error("path-escape", name, "it is a link that leads out of the folder")
    return None


def _wrong_size(path: Path, name: str, size: int) -> Finding | None:
    try:
        found = os.stat(path).st_size
    except OSError as problem:
        return _unreadable(name, problem)
    if found != size:
        return error(
            "file-changed",
            name,
            f"it has {found} bytes, the manifest says {size}",
            "copy the export again",
        )
    return None


def _facts(folder: Path, names: list[str]) -> list[FileFact | OSError]:
    """Digest and size of each file, or why it cannot be read."""
    failed = threading.Event()

    def fact(name: str) -> FileFact | OSError:
        try:
            # A signal waits for no file's end.
            return hash_file(folder / name, lambda: raised or failed.is_set())
        except OSError as problem:
            return problem

    with undisturbed() as raised, ThreadPoolExecutor(_READERS) as readers:
        try:
            return list(readers.map(fact, names))
        finally:
            failed.set()


def _wrong_bytes(name: str, fact: FileFact | OSError, sha256: str) -> Finding | None:
    if isinstance(fact, OSError):
        return _unreadable(name, fact)
    if fact.sha256 != sha256:
        return error(
            "file-changed",
            name,
            f"its SHA-256 is {fact.sha256}, the manifest says {sha256}",
            "copy the export again",
        )
    return None


def _unreadable(name: str, problem: OSError) -> Finding:
    return error("file-corrupt", name, f"it cannot be read: {problem.strerror}")


def _unlisted(folder: Path, manifest: Manifest) -> list[Finding]:
    findings = [
        error(
            "file-unlisted",
            path.name,
            f"SGLang would load it, and {MANIFEST_NAME} does not list it",
            "remove it",
        )
        for path in sorted(folder.iterdir())
        if path.name.endswith(_WEIGHTS)
        and not path.name.startswith(".")
        and path.name not in manifest.files
    ]
    if "config.json" not in manifest.files:
        findings.append(
            error("file-missing", "config.json", f"{MANIFEST_NAME} does not list it")
        )
    return findings


def _headers(
    folder: Path, manifest: Manifest, sound: list[str], findings: list[Finding]
) -> dict[str, Header] | None:
    """The headers of all weight files; None if one of them is not to be trusted."""
    # SGLang loads what lies at the top; probe/ is data of the comparison.
    listed = [n for n in manifest.files if n.endswith(".safetensors") and "/" not in n]
    if any(name not in sound for name in listed):
        return None
    headers = {}
    for name in sorted(listed):
        try:
            headers[name] = read_header(folder / name)
        except SpecExportError as problem:
            findings += problem.findings
            return None
    return headers


def _wrong_tensors(
    manifest: Manifest, headers: dict[str, Header] | None
) -> list[Finding]:
    if headers is None:
        return []
    held: dict[str, tuple[str, list[int]]] = {}
    findings = []
    for file, header in headers.items():
        for name, span in header.tensors.items():
            if name in held:
                findings.append(
                    error("file-contradiction", name, f"{file} holds it a second time")
                )
            held[name] = (span.info.dtype, list(span.info.shape))
    for name in sorted(held.keys() | manifest.tensors.keys()):
        entry, found = manifest.tensors.get(name), held.get(name)
        if found is None:
            why = "the manifest describes it, no weight file holds it"
        elif entry is None:
            why = "a weight file holds it, the manifest does not describe it"
        elif found != (entry.dtype, entry.shape):
            why = (
                f"it is {found[0]} {found[1]}, the manifest says {entry.dtype} "
                f"{entry.shape}"
            )
        else:
            continue
        findings.append(error("file-contradiction", name, why))
    return findings


def _wrong_embedded(
    manifest: Manifest, headers: dict[str, Header] | None
) -> list[Finding]:
    beside: dict[str, Any] = manifest.to_json()
    findings = []
    for file, header in (headers or {}).items():
        text = header.metadata.get(METADATA_KEY)
        if text is None:
            findings.append(
                error("file-contradiction", file, "no manifest is embedded in it")
            )
            continue
        try:
            embedded = Manifest.from_bytes(_completed(text)).to_json()
        except SpecExportError as problem:
            why = problem.findings[0].message
            findings.append(
                error("file-contradiction", file, f"its embedded manifest: {why}")
            )
            continue
        differing = [
            key
            for key in EMBEDDED
            if canonical_json(embedded[key]) != canonical_json(beside[key])
        ]
        if differing:
            findings.append(
                error(
                    "file-contradiction",
                    file,
                    f"its embedded manifest and {MANIFEST_NAME} differ in "
                    f"{', '.join(differing)}",
                )
            )
    return findings


def _completed(text: str) -> bytes:
    """The embedded part as a whole manifest; its status is not part of it."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text.encode()
    if isinstance(content, dict):
        content["status"] = "saved"
    return json.dumps(content).encode()


def _wrong_index(folder: Path, headers: dict[str, Header] | None) -> list[Finding]:
    if headers is None:
        return []
    try:
        weight_map = read_index(folder)
    except SpecExportError as problem:
        return problem.findings
    held = {n: file for file, header in headers.items() for n in header.tensors}
    return [
        error(
            "file-contradiction",
            name,
            f"{INDEX} says {weight_map.get(name)}, it is in {held.get(name)}",
        )
        for name in sorted(held.keys() | weight_map.keys())
        if held.get(name) != weight_map.get(name)
    ]
