"""Object stores: `s3://bucket/...`, `gs://bucket/...`, `az://container/...`, through obstore."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import obstore

from ..errors import StorageError, UsageError
from .base import UNENCODABLE, FileReader, FileStat, NewFile, check_name
from .object_bucket import Bucket, bucket_of
from .object_commit import examine, publish_exclusively
from .object_config import SCHEMES
from .parallel import at_the_same_time
from .ranged import Cut, Piece, fill
from .uploading import Pieces, UploadingStorage

__all__ = ["ObjectStorage"]

#: Length of one part of an upload. A file that fits in one is sent by a single request.
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000  # stores take 10,000
_PARTS_IN_FLIGHT = 12
#: Pauses before each look for what was uploaded, in seconds.
_LOOKS = (0.0, 0.2, 1.0)
#: The shortest and the longest requests of a read, in bytes: each costs processor time on both sides, and Azurite
#: reads up to 4 MiB twice.
_REQUEST_BYTES = 5 << 20, 16 << 20
#: Bytes of an answer that are taken at a time: small enough to stay in the processor's cache until they are copied.
_STREAM_BYTES = 1 << 20
_LISTINGS = 8


class ObjectStorage(UploadingStorage):
    """A folder of a bucket: all objects whose keys begin with the path of the URL.

    Args:
        url: "scheme://bucket/path". The path is taken as it is, without any decoding.
        bucket: instead of the one that the URL and the environment name.
    """

    reads = 16

    def __init__(self, url: str, bucket: Bucket | None = None) -> None:
        scheme, name, path = _parse(url)
        self.url = f"{scheme}://{name}/{path}".rstrip("/")
        self._prefix = f"{path}/" if path else ""
        self._bucket = bucket or bucket_of(scheme, name)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _shown(self, name: str) -> str:
        return f"{self.url}/{name}"

    # --- files ------------------------------------------------------------------------------------------------

    def admit(self, request: NewFile) -> None:
        self._bucket.check("upload", self._shown(request.name))

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        key = self._key(name)
        part = max(_PART_BYTES, -(-size // _MOST_PARTS >> 20) + 1 << 20) if size > _PART_BYTES else size

        def send(client: Any) -> None:
            if size <= part:
                obstore.put(client, key, b"".join(pieces()), use_multipart=False)
                return
            try:
                obstore.put(
                    client, key, pieces(), use_multipart=True, chunk_size=part, max_concurrency=_PARTS_IN_FLIGHT
                )
            except FileNotFoundError as error:
                if "<Code>NoSuchUpload</Code>" not in str(error):
                    raise
            _look_for(client, key, size)

        try:
            self._bucket.run("upload", self._shown(name), send, patient=True)
        except FileNotFoundError as error:
            raise StorageError(f"cannot upload {self._shown(name)}: {error}") from None

    def open(self, name: str) -> FileReader:
        return _Reader(self._bucket, self._key(name), self._shown(name))

    def read(self, name: str) -> bytes:
        key = self._key(name)
        return self._bucket.run("read", self._shown(name), lambda client: bytes(obstore.get(client, key).bytes()))

    def stat(self, name: str) -> FileStat:
        key = self._key(name)
        found = self._bucket.run("look at", self._shown(name), lambda client: obstore.head(client, key))
        version = msgspec.json.encode([found["e_tag"], found["version"]]).decode()
        return FileStat(found["size"], found["last_modified"].timestamp(), version)

    # --- commit -----------------------------------------------------------------------------------------------

    def probe(self, name: str, expected: str) -> None:
        examine(self._bucket, self._prefix, self._shown(name), expected)

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        key, shown = self._key(name), self._shown(name)
        if expected is None:
            self._bucket.run("publish", shown, lambda client: obstore.put(client, key, data, use_multipart=False))
            return
        examine(self._bucket, self._prefix, shown, expected)
        publish_exclusively(self._bucket, key, shown, data, expected, self)

    # --- folders ----------------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        return sorted(self._listing("")[1])

    def _listing(self, folder: str) -> tuple[list[tuple[str, int]], list[str]]:
        """Objects (name, size) and folders directly in a folder ("" or "name/")."""
        prefix = self._prefix + folder
        found = self._bucket.run(
            "list", self.url, lambda client: obstore.list_with_delimiter(client, prefix.rstrip("/") or None)
        )
        # Consoles make empty objects whose keys end in "/" to stand for folders; they come here as the folder itself.
        objects = [(o["path"][len(prefix) :], o["size"]) for o in found["objects"] if len(o["path"]) > len(prefix)]
        folders = [p.rstrip("/")[len(prefix) :] for p in found["common_prefixes"]]
        return objects, [f for f in folders if f]

    def list(self) -> list[tuple[str, int]]:
        objects, folders = self._listing("")
        found = list(objects)
        inside = at_the_same_time(lambda f: self._listing(f + "/"), folders, _LISTINGS, "bytecheckpoint-list")
        for folder, (inner, _) in zip(folders, inside, strict=True):
            found += [(f"{folder}/{name}", size) for name, size in inner]
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        self._bucket.delete([self._key(name) for name in names], self.url)


def _look_for(client: Any, key: str, size: int) -> None:
    """See that a completed upload has left its object.

    A completion whose answer got lost is asked for again, and servers that were killed in between answer that in any way:
    that there is no such upload, although they have carried it out, or that it is done, although they have not.
    """
    for pause in _LOOKS:
        time.sleep(pause)
        try:
            if obstore.head(client, key)["size"] == size:
                return
        except FileNotFoundError:
            pass
    raise obstore.exceptions.GenericError("HTTP error: the object is not there after its upload")


class _Reader(FileReader):
    step_bytes = 64 << 20

    def __init__(self, bucket: Bucket, key: str, shown: str) -> None:
        self._bucket = bucket
        self._key = key
        self._shown = shown
        self.size = bucket.run("open", shown, lambda client: obstore.head(client, key))["size"]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._bucket.connections.share() as parts:
            return fill(self._get, offset, buffers, self.size, Cut(parts, *_REQUEST_BYTES))

    def _get(self, piece: Piece) -> int:
        """Fill one piece; the bytes read, fewer when the object was removed or cut meanwhile."""
        start, target = piece
        done = 0

        def request(client: Any) -> None:
            # What has arrived before a connection broke is not asked for again.
            nonlocal done
            rest: Any = {"range": (start + done, start + len(target))}
            before = done
            try:
                for data in obstore.get(client, self._key, options=rest).stream(min_chunk_size=_STREAM_BYTES):
                    part = np.frombuffer(data, np.uint8)
                    np.copyto(target[done : done + len(part)], part)
                    done += len(part)
            except (obstore.exceptions.BaseError, OSError):
                if done - before < _STREAM_BYTES:
                    raise  # else it goes on, if slowly: the time for trying again begins anew

        while done < len(target):
            before = done
            try:
                self._bucket.run("read", self._shown, request)
            except FileNotFoundError:
                break
            if done == before:
                break
        return done

    def close(self) -> None:
        pass


def _parse(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and path of a URL.

    Raises:
        UsageError: it names no bucket, or holds what could be credentials; the message does not repeat them.
    """
    scheme, _, rest = url.partition("://")
    name, _, path = rest.partition("/")
    kind = SCHEMES.get(scheme, "bucket")
    if "@" in name or ":" in name or "?" in rest:  # what precedes an "@" may hold a "/", as secret keys do
        raise UsageError(
            f"a {scheme}:// URL takes no user name, port or query: credentials belong in the environment, and so does the "
            f"endpoint"
        )
    path = path.strip("/")
    if not name:
        raise UsageError(f"{url!r} names no {kind}: write {scheme}://{kind}/folder")
    # Azure takes a backslash for a slash, but in listings.
    if UNENCODABLE.search(path) or "\\" in path or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise UsageError(
            f"{url!r} has an empty, '.' or '..' part, a backslash or a control character: write {scheme}://{kind}/folder"
        )
    return scheme, name, path
