"""`mem://name/...`: files in this machine's memory that outlive the process."""

from __future__ import annotations

import os
import stat

from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import check_name
from bytecheckpoint.storage.posix.files import translated
from bytecheckpoint.storage.posix.storage import PosixStorage

__all__ = ["MemoryStorage"]


class MemoryStorage(PosixStorage):
    """A folder under /dev/shm/bytecheckpoint-<user id>, which only this user can enter.

    It lasts until it is removed or the machine restarts. Processes of the same user on the same machine see the same
    files; other machines see none of them. Its size is limited by the memory file system, usually to half of the memory.
    """

    def __init__(self, url: str) -> None:
        name = url.partition("://")[2].rstrip("/")
        try:
            check_name(name)
        except UsageError:
            raise UsageError(f"{url!r} names no place in memory: write mem://name or mem://name/step_1") from None
        base = os.path.join(settings().storage.memory_dir, f"bytecheckpoint-{os.geteuid()}")
        super().__init__(os.path.join(base, *name.split("/")), f"mem://{name}")
        self._base = base
        if os.path.lexists(base):
            self._refuse_foreign()

    def _make_folder(self, folder: str) -> None:
        with translated(f"create {self._base} for", self.url):
            try:
                os.mkdir(self._base, 0o700)
            except FileExistsError:
                self._refuse_foreign()
        super()._make_folder(folder)

    def _other_root(self, url: str) -> str | None:
        return MemoryStorage(url).root if url.startswith("mem://") else None

    def _refuse_foreign(self) -> None:
        """Raise StorageError for a folder that belongs or is open to others, since anybody may create one in /dev/shm."""
        found = os.lstat(self._base)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StorageError(
                f"cannot use {self.url}: {self._base} belongs to somebody else or is open to others; remove it or set "
                f"memory_dir"
            )
