"""Object stores: `s3://bucket/...`, `gs://bucket/...`, `az://container/...`, through obstore."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import obstore

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.storage.base import (
    UNENCODABLE,
    Capabilities,
    FileReader,
    FileStat,
    NewFile,
    Storage,
    check_name,
)
from bytecheckpoint.storage.objects.bucket import Bucket, bucket_of
from bytecheckpoint.storage.objects.commit import publish_exclusively, require_commits
from bytecheckpoint.storage.objects.config import SCHEMES
from bytecheckpoint.storage.objects.errors import facts_of
from bytecheckpoint.storage.optional import ServerCopy, UnfinishedUpload, UploadCleanup
from bytecheckpoint.storage.ranged import RangeRequest, RequestSizes, read_in_parallel
from bytecheckpoint.storage.uploading import Pieces, UploadingStorage
from bytecheckpoint.tracing.operation import count_retries, pause

__all__ = ["ObjectStorage"]

#: Length of one part of an upload. A file that fits in one part is sent by a single request.
_PART_BYTES = 8 << 20
_MAX_PARTS = 9_000  # stores accept 10,000
_PARTS_IN_FLIGHT = 12
#: Longest object that one request may copy, so that it is done before the request times out; S3 takes up to 5 GiB.
_MAX_COPY_BYTES = 1 << 30
#: Error codes by which S3 and Azure refuse to complete an upload that is completed, or gone.
_COMPLETED_BEFORE = {"NoSuchUpload", "InvalidBlockList"}
#: Seconds of pause before each further check that an uploaded object is present.
_CHECK_PAUSES = (0.2, 1.0)
#: The shortest and the longest requests of a read, in bytes. Each costs processor time on both sides, and Azurite reads
#: up to 4 MiB twice.
_REQUEST_BYTES = 5 << 20, 16 << 20
#: Bytes of a response that are copied at once: few enough to be still in the processor's cache.
_STREAM_BYTES = 1 << 20
_LISTINGS = 8


class ObjectStorage(UploadingStorage, ServerCopy, UploadCleanup):
    """A folder of a bucket: all objects whose keys begin with the path of the URL.

    Args:
        url: "scheme://bucket/path". The path is not decoded.
        bucket: replaces the bucket that the URL and the environment name.
    """

    capabilities = Capabilities(whole_files=True, parallel_reads=16)

    def __init__(self, url: str, bucket: Bucket | None = None) -> None:
        scheme, name, path = _parse(url)
        self.url = f"{scheme}://{name}/{path}".rstrip("/")
        self._prefix = f"{path}/" if path else ""
        self._bucket = bucket or bucket_of(scheme, name)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _label(self, name: str) -> str:
        return f"{self.url}/{name}"

    # --- files ------------------------------------------------------------------------------------------------

    def check_upload(self, request: NewFile) -> None:
        self._bucket.check("upload", self._label(request.name))

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        key = self._key(name)
        part = max(_PART_BYTES, -(-size // _MAX_PARTS >> 20) + 1 << 20) if size > _PART_BYTES else size

        def send(client: Any) -> None:
            if size <= part:
                obstore.put(client, key, b"".join(pieces()), use_multipart=False)
                return
            try:
                obstore.put(
                    client, key, pieces(), use_multipart=True, chunk_size=part, max_concurrency=_PARTS_IN_FLIGHT
                )
            except (FileNotFoundError, obstore.exceptions.BaseError) as error:
                if facts_of(error).code not in _COMPLETED_BEFORE:
                    raise
            self._check_uploaded(name, size)

        try:
            self._bucket.run("upload", self._label(name), send, many_requests=size > part)
        except FileNotFoundError as error:
            raise StorageError(f"cannot upload {self._label(name)}: {error}") from None

    def _check_uploaded(self, name: str, size: int) -> None:
        """Check that a completed upload has created its object.

        The client repeats a completion whose response is lost. The server may then answer that there is no such upload,
        because it has completed it; and one that was killed in between, that it is complete although it is not.
        """
        for seconds in (None, *_CHECK_PAUSES):
            if seconds is not None:
                pause(seconds)
            try:
                if self.stat(name).size == size:
                    return
            except FileNotFoundError:
                pass
        raise obstore.exceptions.GenericError("HTTP error: the object is not there after its upload")

    def open(self, name: str) -> FileReader:
        return _ObjectReader(self._bucket, self._key(name), self._label(name))

    def read(self, name: str) -> bytes:
        key = self._key(name)
        return self._bucket.run("read", self._label(name), lambda client: bytes(obstore.get(client, key).bytes()))

    def stat(self, name: str) -> FileStat:
        key = self._key(name)
        found = self._bucket.run("look at", self._label(name), lambda client: obstore.head(client, key))
        version = msgspec.json.encode([found["e_tag"], found["version"]]).decode()
        return FileStat(found["size"], found["last_modified"].timestamp(), version)

    # --- commit -----------------------------------------------------------------------------------------------

    def check_publish(self, name: str, expected: str) -> None:
        require_commits(self._bucket, self._prefix, self._label(name), expected)

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        key, label = self._key(name), self._label(name)
        if expected is None:
            self._bucket.run("publish", label, lambda client: obstore.put(client, key, data, use_multipart=False))
            return
        require_commits(self._bucket, self._prefix, label, expected)
        publish_exclusively(self._bucket, key, label, data, expected, self)

    def copy_from(self, source: Storage, name: str, size: int) -> bool:
        if not (isinstance(source, ObjectStorage) and source._bucket is self._bucket and size <= _MAX_COPY_BYTES):
            return False
        here, there = self._key(name), source._key(name)
        try:
            self._bucket.run("copy", self._label(name), lambda client: obstore.copy(client, there, here))
        except (FileNotFoundError, StorageError):  # a copy through this machine reports the cause
            return False
        return True

    # --- folders ----------------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        return sorted(self._listing("")[1])

    def _listing(self, folder: str) -> tuple[list[tuple[str, int]], list[str]]:
        """Return the objects (name, size) and the folders directly in a folder ("" or "name/")."""
        prefix = self._prefix + folder
        found = self._bucket.run(
            "list", self.url, lambda client: obstore.list_with_delimiter(client, prefix.rstrip("/") or None)
        )
        # Consoles create empty objects whose keys end in "/" as folders. They are listed as the folder itself.
        objects = [(o["path"][len(prefix) :], o["size"]) for o in found["objects"] if len(o["path"]) > len(prefix)]
        folders = [p.rstrip("/")[len(prefix) :] for p in found["common_prefixes"]]
        return objects, [f for f in folders if f]

    def list(self) -> list[tuple[str, int]]:
        objects, folders = self._listing("")
        found = list(objects)
        inside = parallel_map(lambda f: self._listing(f + "/"), folders, _LISTINGS, "bytecheckpoint-list")
        for folder, (inner, _) in zip(folders, inside, strict=True):
            found += [(f"{folder}/{name}", size) for name, size in inner]
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        self._bucket.delete([self._key(name) for name in names], self.url)

    # --- unfinished uploads -----------------------------------------------------------------------------------

    def unfinished_uploads(self) -> Sequence[UnfinishedUpload]:
        uploads = self._bucket.clients.uploads()
        return uploads.list(self._prefix) if uploads is not None else ()

    def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        if (of_bucket := self._bucket.clients.uploads()) is not None:
            of_bucket.abort(self._prefix, uploads)


class _ObjectReader(FileReader):
    preferred_bytes = 64 << 20

    def __init__(self, bucket: Bucket, key: str, label: str) -> None:
        self._bucket = bucket
        self._key = key
        self._label = label
        self.size = bucket.run("open", label, lambda client: obstore.head(client, key))["size"]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._bucket.connections.share() as connections:
            sizes = RequestSizes(connections, *_REQUEST_BYTES)
            return read_in_parallel(self._get, offset, buffers, self.size, sizes)

    def _get(self, request: RangeRequest) -> int:
        """Carry out one request. Returns the bytes read, fewer when the object was removed or replaced meanwhile."""
        start, target = request
        done = 0

        def attempt(client: Any) -> None:
            nonlocal done  # bytes that arrived before a connection broke are not requested again
            rest: Any = {"range": (start + done, start + len(target))}
            before = done
            try:
                for data in obstore.get(client, self._key, options=rest).stream(min_chunk_size=_STREAM_BYTES):
                    part = np.frombuffer(data, np.uint8)
                    np.copyto(target[done : done + len(part)], part)
                    done += len(part)
            except (obstore.exceptions.BaseError, OSError):
                if done - before < _STREAM_BYTES:
                    raise
                # The read makes progress, so its time for retries begins anew.

        while done < len(target):
            before = done
            try:
                self._bucket.run("read", self._label, attempt)
            except FileNotFoundError:
                break
            if done == before:
                break
            if done < len(target):
                count_retries()
        return done

    def close(self) -> None:
        pass


def _parse(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and path of a URL.

    Raises:
        UsageError: it names no bucket, or may hold credentials, which the message does not repeat.
    """
    scheme, _, rest = url.partition("://")
    name, _, path = rest.partition("/")
    kind = SCHEMES.get(scheme, "bucket")
    if "@" in name or ":" in name or "?" in rest:  # a secret key before an "@" may contain "/"
        raise UsageError(
            f"a {scheme}:// URL takes no user name, port or query: credentials belong in the environment, and so does the "
            f"endpoint"
        )
    path = path.strip("/")
    if not name:
        raise UsageError(f"{url!r} names no {kind}: write {scheme}://{kind}/folder")
    # Azure treats a backslash as a slash, except in listings.
    if UNENCODABLE.search(path) or "\\" in path or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise UsageError(
            f"{url!r} has an empty, '.' or '..' part, a backslash or a control character: write {scheme}://{kind}/folder"
        )
    return scheme, name, path
