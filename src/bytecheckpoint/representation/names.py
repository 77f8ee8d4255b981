"""Names of the files inside a checkpoint. Cleanup deletes only files with names of these forms."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Final

import xxhash

from bytecheckpoint.errors import UsageError

__all__ = [
    "CATALOG_NAME",
    "GENERATION_LENGTH",
    "METRICS_FOLDER",
    "STEP_FOLDER",
    "VALUES_NAME",
    "check_file_name",
    "companions",
    "delta_name",
    "escape",
    "file_stem",
    "generation_of",
    "is_of_values",
    "is_uri",
    "natural_order",
    "new_generation",
    "state_folder",
    "storage_file_name",
    "unescape",
    "unique_name",
    "values_file_name",
    "view_file_name",
    "view_generation_of",
]

CATALOG_NAME: Final = "metadata.parquet"
VALUES_NAME: Final = ".bytecheckpoint-values"
"""Beginning of the names of files in memory that hold what no file of another program's checkpoint holds as it is."""
GENERATION_LENGTH: Final = 24
#: Folder of the metrics, in the folder of the run, or of a checkpoint by itself.
METRICS_FOLDER: Final = ".bytecheckpoint-metrics"
#: Names of the folders in which managers save steps.
STEP_FOLDER = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")

_EXTRA_STATE, _EXTRA_FOLDER = "extra_states", "extra"
# Lower case only: "Model" and "model" are the same folder on a file system that ignores case.
_PLAIN_FOLDER = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_HASHED_FOLDER = re.compile(r"kind-[0-9a-f]{16}")
_DEVICE_NAME = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")  # reserved on Windows
_OWN_FILE = re.compile(
    r"[a-z0-9][a-z0-9_-]{0,63}/"
    r"(?:rank|values)-(?:[0-9]{5}|[1-9][0-9]{5,})(?:-p(?:[0-9]{3}|[1-9][0-9]{3,}))?"
    r"\.(?P<generation>[0-9a-f]{24})\.(?:safetensors|delta)"
)
_VIEW_FILE = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.(?P<generation>[0-9a-f]{24})\.safetensors")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+", re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff\ufdd0]")
_ESCAPED = re.compile("\ufdd0([0-9a-f]{4})")
#: Longest name of a file or folder on the usual file systems, in bytes.
_LONGEST_COMPONENT = 255
_NUMBER = re.compile(r"([0-9]+)")


def state_folder(state: str) -> str:
    """Return the folder of a state's storage files: a safe name, different for different states.

    A state of lower-case letters, digits, "_" and "-" is its own folder, and "extra_states" has the folder "extra". Any
    other kind has the folder "kind-" + the 16 hex digits of its xxh3_64.
    """
    if state == _EXTRA_STATE:
        return _EXTRA_FOLDER
    if (
        _PLAIN_FOLDER.fullmatch(state)
        and state != _EXTRA_FOLDER
        and not _HASHED_FOLDER.fullmatch(state)
        and not _DEVICE_NAME.fullmatch(state)
    ):
        return state
    return "kind-" + xxhash.xxh3_64_hexdigest(state.encode("utf-8", "surrogatepass"))


def storage_file_name(state: str, rank: int, generation: str, part: int = 0, suffix: str = "safetensors") -> str:
    """Return the name of the file of tensors, e.g. "model/rank-00003.<generation>.safetensors".

    Args:
        state: name of the state.
        rank: the rank that writes the file.
        generation: generation of the save, from `new_generation`.
        part: 0 for the first file of this rank and state, 1, 2, ... for further files.
        suffix: "safetensors", or "delta" for a file that is kept as differences.
    """
    number = f"-p{part:03d}" if part else ""
    return f"{state_folder(state)}/rank-{rank:05d}{number}.{generation}.{suffix}"


def values_file_name(state: str, rank: int, generation: str, part: int = 0, suffix: str = "safetensors") -> str:
    """Return the name of the file of plain values, e.g. "optimizer/values-00003.<generation>.safetensors"."""
    number = f"-p{part:03d}" if part else ""
    return f"{state_folder(state)}/values-{rank:05d}{number}.{generation}.{suffix}"


def file_stem(name: str) -> str:
    """Return the part of a storage file's name that is the same in every save, e.g. "model/rank-00003-p001"."""
    return name.rsplit(".", 2)[0]


def delta_name(name: str) -> str:
    """Return the name of the file with the differences of a storage file: its own, or that of the one beside it."""
    return f"{name.rpartition('.')[0]}.delta"


def companions(names: Iterable[str]) -> set[str]:
    """Return the names of the files of differences that may lie beside whole storage files; no catalog has them."""
    return {delta_name(name) for name in names if name.endswith(".safetensors")}


def generation_of(name: str) -> str | None:
    """Return the generation in a storage file's name, or None when the name is not of this package's form."""
    match = _OWN_FILE.fullmatch(name)
    return match["generation"] if match else None


def view_file_name(number: int, count: int, generation: str) -> str:
    """Return the name of a file of a step's view: number `number`, from 1, of `count`."""
    return f"model-{number:05d}-of-{count:05d}.{generation}.safetensors"


def view_generation_of(name: str) -> str | None:
    """Return the generation in the name of a view's file, or None when the name is not of this form."""
    match = _VIEW_FILE.fullmatch(name)
    return match["generation"] if match else None


def is_of_values(name: str) -> bool:
    """Return whether a storage file, by its name or URI, holds plain values, not the tensors of modules and optimizers."""
    inside = "/".join(name.rsplit("/", 2)[-2:])
    return generation_of(inside) is not None and "/values-" in inside


def new_generation(world_id: str, sequence: int) -> str:
    """Return the generation of a save: 24 hex digits that all ranks compute without communication.

    Args:
        world_id: identity of the running job, which all ranks agree on once and every start of the job changes.
        sequence: number of the save within the job.
    """
    return xxhash.xxh3_128_hexdigest(f"{sequence}:{world_id}".encode("utf-8", "surrogatepass"))[:GENERATION_LENGTH]


def is_uri(name: str) -> bool:
    """Return whether `name`, from a catalog's table of files, is a URI ("scheme://...")."""
    return _URI.fullmatch(name) is not None


def check_file_name(name: str) -> str:
    """Return `name` if it is a URI, or names a file inside the checkpoint on every platform.

    Raises:
        UsageError: the name is empty, absolute, has a drive, backslash, control character, or a component that is
            empty, "." or "..", or longer than 255 bytes.
    """
    if is_uri(name) and not _CONTROL.search(name):
        return name
    parts = name.split("/")
    if _CONTROL.search(name) or "\\" in name or _DRIVE.match(name) or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"file name {name[:200]!r} does not stay inside the checkpoint: use a plain relative name")
    if any(len(part.encode("utf-8", "surrogatepass")) > _LONGEST_COMPONENT for part in parts):
        raise UsageError(f"file name {name[:200]!r}... is too long for a file system: use shorter names")
    return name


def escape(text: str) -> str:
    """Return `text` as valid Unicode: each lone surrogate, and U+FDD0 itself, becomes U+FDD0 and four hex digits.

    Python strings may hold lone surrogates, which UTF-8 cannot encode. U+FDD0 is a noncharacter, which real names lack.
    """
    if text.isascii():  # the usual case
        return text
    return _SURROGATE.sub(lambda match: f"\ufdd0{ord(match[0]):04x}", text)


def unescape(text: str) -> str:
    """Undo `escape`."""
    if text.isascii():
        return text
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts step_9 before step_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _NUMBER.split(name)]


def unique_name(name: str, taken: Container[str]) -> str:
    """Return the first of `name`, `name#2`, `name#3`, ... that is not in `taken`."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
