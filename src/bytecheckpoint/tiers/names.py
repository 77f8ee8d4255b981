"""The names of a hot tier: the folder of a URL, and the internal files that lie beside a step's own."""

from __future__ import annotations

import re

import xxhash

__all__ = ["INTERNAL_FILES", "IS_RECORD", "LOCK", "digest_of", "hot_folder_of", "record_name", "step_name"]

#: The file that flushes of a step lock.
LOCK = "tier.lock"
#: Files of a hot folder that do not belong to the checkpoint; among them the records of steps.
IS_RECORD = re.compile(r"tier-[0-9a-f]{16}\.json")
INTERNAL_FILES = re.compile(rf"{IS_RECORD.pattern}|tier\.lock|\.publishing-[0-9a-f]+")
#: Characters that the name of a folder cannot hold.
_UNSAFE = re.compile(r"[%:\\\x00-\x1f\x7f]")


def digest_of(catalog: bytes) -> str:
    """Return the digest of a catalog, which identifies a hot step."""
    return xxhash.xxh3_64_hexdigest(catalog)


def record_name(catalog: bytes) -> str:
    """Return the name of the record of the step with this catalog."""
    return f"tier-{digest_of(catalog)}.json"


def hot_folder_of(url: str) -> str:
    """Return the relative path of a URL's hot folder: readable, and different for different URLs."""
    scheme, _, rest = url.partition("://")
    parts = [scheme, *rest.strip("/").split("/")]
    return "/".join(_UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", part) for part in parts)


def step_name(folder: str) -> str:
    """Return the name that a step has in its URL, given the name of its folder in the hot tier."""
    return re.sub("%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), folder)
