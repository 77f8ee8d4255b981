"""Raw access to the files of storages, by the plain clients of their servers."""

from __future__ import annotations

from typing import Any

import fsspec
import hdfs_native
import obstore
import obstore.store

from bytecheckpoint.storage.testing import RawAccess

__all__ = ["FsspecMemoryAccess", "HdfsAccess", "ObstoreAccess"]


class FsspecMemoryAccess(RawAccess):
    """The dictionary of fsspec's memory file system."""

    def __init__(self, path: str) -> None:
        self._prefix = f"/{path}/"
        self._fs: Any = fsspec.filesystem("memory")

    def files(self) -> dict[str, bytes]:
        found = {path: file.getvalue() for path, file in self._fs.store.items() if path.startswith(self._prefix)}
        return {path.removeprefix(self._prefix): data for path, data in found.items()}

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._prefix + name, data)

    def remove(self, name: str) -> None:
        del self._fs.store[self._prefix + name]


class ObstoreAccess(RawAccess):
    """A plain client of an object store."""

    def __init__(self, client: obstore.store.ObjectStore, path: str) -> None:
        self._client = client
        self._prefix = f"{path}/"

    def files(self) -> dict[str, bytes]:
        keys = [found["path"] for found in obstore.list(self._client, prefix=self._prefix).collect()]
        return {key.removeprefix(self._prefix): bytes(obstore.get(self._client, key).bytes()) for key in keys}

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._client, self._prefix + name, data)

    def remove(self, name: str) -> None:
        obstore.delete(self._client, self._prefix + name)


class HdfsAccess(RawAccess):
    """A plain client of a NameNode."""

    def __init__(self, client: hdfs_native.Client, path: str) -> None:
        self._client = client
        self._path = path

    def files(self) -> dict[str, bytes]:
        try:
            paths = [entry.path for entry in self._client.list_status(self._path, True) if not entry.isdir]
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self._path}/"): bytes(self._client.read(path).read()) for path in paths}

    def put(self, name: str, data: bytes) -> None:
        options = hdfs_native.WriteOptions(overwrite=True, create_parent=True)
        with self._client.create(f"{self._path}/{name}", options) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        self._client.delete(f"{self._path}/{name}")
