"""Names of the files inside a checkpoint, all made here; a name that is not of this form is never deleted."""

from __future__ import annotations

import re
from typing import Final

import xxhash

from bytecheckpoint.errors import UsageError

__all__ = [
    "CATALOG_NAME",
    "GENERATION_LENGTH",
    "check_relative",
    "escape",
    "file_stem",
    "generation_of",
    "is_uri",
    "kind_folder",
    "new_generation",
    "storage_file_name",
    "unescape",
    "values_file_name",
]

CATALOG_NAME: Final = "metadata.parquet"
GENERATION_LENGTH: Final = 24

_EXTRA_STATES = ("extra_states", "extra")
# Lower case only: "Model" and "model" would be one folder on a file system that ignores case.
_PLAIN_FOLDER = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_HASHED_FOLDER = re.compile(r"kind-[0-9a-f]{16}")
_DEVICE_NAME = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")  # reserved on Windows
_OWN_FILE = re.compile(
    r"[a-z0-9][a-z0-9_-]{0,63}/"
    r"(?:rank|values)-(?:[0-9]{5}|[1-9][0-9]{5,})(?:-p(?:[0-9]{3}|[1-9][0-9]{3,}))?"
    r"\.(?P<generation>[0-9a-f]{24})\.safetensors"
)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff\ufdd0]")
_ESCAPED = re.compile("\ufdd0([0-9a-f]{4})")


def kind_folder(kind: str) -> str:
    """The folder of a kind's storage files: a safe name, different for different kinds.

    Lower-case names of letters, digits, "_" and "-" stand for themselves and "extra_states" is "extra"; any other
    name becomes "kind-" and the 16 hex digits of its xxh3_64.
    """
    if kind == _EXTRA_STATES[0]:
        return _EXTRA_STATES[1]
    if (
        _PLAIN_FOLDER.fullmatch(kind)
        and kind != _EXTRA_STATES[1]
        and not _HASHED_FOLDER.fullmatch(kind)
        and not _DEVICE_NAME.fullmatch(kind)
    ):
        return kind
    return "kind-" + xxhash.xxh3_64_hexdigest(kind.encode("utf-8", "surrogatepass"))


def storage_file_name(kind: str, rank: int, generation: str, part: int = 0) -> str:
    """Name of the tensors of `kind` that `rank` writes, e.g. "model/rank-00003.<generation>.safetensors".

    Args:
        kind: name of the state.
        rank: the writing rank.
        generation: from `new_generation`.
        part: 0 for the only or first file; further files of the same rank and kind count from 1.
    """
    suffix = f"-p{part:03d}" if part else ""
    return f"{kind_folder(kind)}/rank-{rank:05d}{suffix}.{generation}.safetensors"


def values_file_name(kind: str, rank: int, generation: str, part: int = 0) -> str:
    """Name of the file with the plain values of `kind`, e.g. "optimizer/values-00003.<generation>.safetensors"."""
    suffix = f"-p{part:03d}" if part else ""
    return f"{kind_folder(kind)}/values-{rank:05d}{suffix}.{generation}.safetensors"


def file_stem(name: str) -> str:
    """A storage file's name but for generation and ending, e.g. "model/rank-00003-p001": the same in every save."""
    return name.rsplit(".", 2)[0]


def generation_of(name: str) -> str | None:
    """The generation in the name of a storage file (relative to the checkpoint), or None for any name not ours."""
    match = _OWN_FILE.fullmatch(name)
    return match["generation"] if match else None


def new_generation(world_id: str, sequence: int) -> str:
    """24 hex digits that all ranks of a world derive alike, without communication.

    Args:
        world_id: identity of the running job, agreed once and different for every start.
        sequence: number of the save within the job.
    """
    return xxhash.xxh3_128_hexdigest(f"{sequence}:{world_id}".encode("utf-8", "surrogatepass"))[:GENERATION_LENGTH]


def is_uri(name: str) -> bool:
    """Whether a name in a catalog's file table is a URI ("scheme://...") and not a name inside the checkpoint."""
    return _URI.fullmatch(name) is not None


def check_relative(name: str) -> str:
    """`name`, if it names a file inside the checkpoint whatever the platform, or is a URI.

    Raises:
        UsageError: the name is empty, absolute, has a drive, backslash, control character, or a component that is
            empty, "." or "..".
    """
    if is_uri(name) and not _CONTROL.search(name):
        return name
    parts = name.split("/")
    if _CONTROL.search(name) or "\\" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"file name {name[:200]!r} does not stay inside the checkpoint: use a plain relative name")
    return name


def escape(text: str) -> str:
    """`text` as valid Unicode: each lone surrogate becomes U+FDD0 and four hex digits, as does U+FDD0 itself.

    Python strings may hold lone surrogates, UTF-8 may not; U+FDD0 is a noncharacter that no real name holds.
    """
    if text.isascii():  # nearly all
        return text
    return _SURROGATE.sub(lambda match: f"\ufdd0{ord(match[0]):04x}", text)


def unescape(text: str) -> str:
    """The inverse of `escape`."""
    if text.isascii():
        return text
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
