"""What a hot tier calls things: the folder of a URL, and the records that are kept beside a step's files."""

from __future__ import annotations

import re

import msgspec
import xxhash

__all__ = ["HOUSEHOLD", "LOCK", "UNKNOWN", "Record", "digest_of", "place_of", "record_name", "unplaced"]

#: The version of a durable catalog at which nobody could look.
UNKNOWN = "?"
#: File that flushes of a step hold while they work.
LOCK = "tier.lock"
#: Names in a hot folder that are not the checkpoint's.
HOUSEHOLD = re.compile(r"tier-([0-9a-f]{16})\.json|tier\.lock|\.publishing-[0-9a-f]+")
#: What a folder's name cannot hold as it is.
_UNSAFE = re.compile(r"[%:\\\x00-\x1f\x7f]")


def digest_of(catalog: bytes) -> str:
    """What a hot step is called in its record."""
    return xxhash.xxh3_64_hexdigest(catalog)


class Record(msgspec.Struct, frozen=True):
    """What a machine remembers about a step in its hot tier.

    Attributes:
        url: of the durable checkpoint.
        replaces: version of the durable catalog when the save began, "" for none, UNKNOWN when it could not be told.
        saved: when it was committed here, seconds since 1970.
        ranks: those that saved on this machine; empty when that is not known (yet).
        flushed: whether the durable storage has it.
    """

    url: str
    replaces: str
    saved: float
    ranks: list[int] = []
    flushed: bool = False


def record_name(digest: str) -> str:
    """The file of the record of the step with this digest."""
    return f"tier-{digest}.json"


def place_of(url: str) -> str:
    """A relative path for a URL: readable, and different for different URLs."""
    scheme, _, rest = url.partition("://")
    parts = [scheme, *rest.strip("/").split("/")]
    return "/".join(_UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", part) for part in parts)


def unplaced(name: str) -> str:
    """What the folder of a step is called in its URL, from its name in the hot tier."""
    return re.sub("%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), name)
