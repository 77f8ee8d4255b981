"""Loading from a tier with several machines: which copy counts, and who has which file."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..collectives import Collective, host_id
from ..collectives.sockets import is_loopback, local_addresses
from ..errors import CheckpointError
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, is_uri
from ..settings import Settings
from ..storage import FileReader
from ..storage.tier import Record, TierStorage, digest_of
from .party import Party
from .peers import Address, PeerReader, Peers, PeerServer

__all__ = ["SharedTier", "meet"]

_log = logging.getLogger("bytecheckpoint")


class SharedTier(TierStorage):
    """A tier as the ranks of a load see it together: this machine's files, those of the others, the durable ones.

    Args:
        url: of the tier.
        catalog: the hot step that counts.
        elsewhere: for each file, the ranks of other machines that serve it.
        peers: connections to them.
    """

    def __init__(self, url: str, catalog: bytes, elsewhere: dict[str, list[Address]], peers: Peers) -> None:
        super().__init__(url)
        self._agreed = catalog
        self._elsewhere = elsewhere
        self._peers = peers
        self._sizes = {file.name: file.size for file in decode(catalog).files}

    def _catalog(self) -> bytes:
        return self._agreed

    def copies(self, name: str) -> list[Callable[[], FileReader]]:  # noqa: D102 (inherited)
        here, durable = super().copies(name)
        return [here, *(self._opener(address, name) for address in self._elsewhere.get(name, ())), durable]

    def _opener(self, address: Address, name: str) -> Callable[[], FileReader]:
        return lambda: PeerReader(self._peers, address, name, self._sizes[name])


def meet(
    storage: TierStorage, collective: Collective, tag: str, force: Settings, stack: contextlib.ExitStack
) -> TierStorage:
    """Agree which copy of a step counts, and open this machine's memory to the others until `stack` is closed.

    Every rank of the load calls it.

    Args:
        storage: as this rank sees it.
        collective: the ranks.
        tag: unique to this load.
        force: time limits.
        stack: ended when all ranks have loaded.

    Returns:
        What to load from: the hot step that the machines have among them, or the durable one.
    """
    party = Party(collective, tag, force.timeout)
    machines = party.machines()
    mine = storage.hot_catalog() if machines.leads(party.rank) else None
    record = storage.record(mine) if mine is not None else None

    def look() -> tuple[str, Record | None, list[tuple[str, int]]]:
        if mine is None:
            files = storage.hot.list() if machines.leads(party.rank) else []
            return "", None, files
        return digest_of(mine), record, storage.hot.list()

    found: dict[str, list[int]] = {}
    records: dict[str, Record] = {}
    lists: dict[int, dict[str, int]] = {}

    def candidates(words: list[Any]) -> list[tuple[str, int]]:
        for rank, (digest, told, files) in enumerate(words):
            lists[rank] = dict(files)
            if digest:
                found.setdefault(digest, []).append(rank)
                if told is not None:
                    records[digest] = msgspec.convert(told, Record)
        order = sorted(found, key=lambda digest: -records[digest].saved if digest in records else 0.0)
        return [(digest, found[digest][0]) for digest in order]

    proposed = party.agree("look", look, candidates)
    lacking: list[str] = []
    for number, (digest, holder) in enumerate(proposed):

        def send(holder: int = holder) -> bytes:
            return mine or b"" if party.rank == holder else b""

        def judge(
            words: list[bytes], digest: str = digest, holder: int = holder
        ) -> tuple[bytes, dict[str, list[int]], list[str]]:
            data = words[holder]
            if not storage.supersedes(data, records.get(digest)):
                return b"", {}, []
            places, nowhere = _places(storage, data, lists)
            return (b"", {}, nowhere) if nowhere else (data, places, [])

        catalog, places, nowhere = party.agree(f"catalog-{number}", send, judge)
        if catalog:
            return _open_memory(party, machines.of, storage, catalog, places, force, stack)
        lacking = lacking or nowhere
    return _DurableOnly(storage.url, lacking)


class _DurableOnly(TierStorage):
    """The hot copies, if there are any, do not count.

    Args:
        url: of the tier.
        lacking: files of a hot step that would count, if they were anywhere.
    """

    def __init__(self, url: str, lacking: list[str]) -> None:
        super().__init__(url)
        self._lacking = lacking

    def _catalog(self) -> bytes:
        return self.durable_catalog(self._lacking, "none of these machines")


def _places(
    storage: TierStorage, catalog: bytes, lists: dict[int, dict[str, int]]
) -> tuple[dict[str, list[int]], list[str]]:
    """The ranks on whose machines each file is, and the files that are nowhere."""
    try:
        files = [file for file in decode(catalog).files if not is_uri(file.name)]
    except CheckpointError as error:
        _log.warning("%s: a hot catalog cannot be read: %s", storage.url, error)
        return {}, [CATALOG_NAME]
    places = {
        file.name: [rank for rank, listed in lists.items() if listed.get(file.name) == file.size] for file in files
    }
    lacking = {file.name: file.size for file in files if not places[file.name]}
    if lacking:
        present: dict[str, int] = {}
        try:
            present = dict(storage.durable.list())
        except CheckpointError as error:
            _log.warning("%s: %s", storage.url, error)
        lacking = {name: size for name, size in lacking.items() if present.get(name) != size}
    return places, sorted(lacking)


def _open_memory(
    party: Party,
    machine: Sequence[int],
    storage: TierStorage,
    catalog: bytes,
    places: dict[str, list[int]],
    force: Settings,
    stack: contextlib.ExitStack,
) -> TierStorage:
    serving = any(party.rank in ranks for ranks in places.values()) and len(set(machine)) > 1
    secret = b""

    def serve() -> tuple[list[str], int, str]:
        if not serving:
            return [], 0, ""
        server = PeerServer(storage.hot, bytes.fromhex(token))
        stack.callback(server.close)
        return local_addresses(os.environ.get("MASTER_ADDR")), server.port, host_id()

    token = party.agree("secret", lambda: secrets.token_hex(32) if party.rank == 0 else "", lambda words: words[0])
    secret = bytes.fromhex(token)
    told = party.agree("serve", serve, lambda words: words)
    peers = Peers(secret, force.timeout)
    stack.callback(peers.close)
    elsewhere: dict[str, list[Address]] = {}
    for name, ranks in places.items():
        # Those that read this file from afar do not all ask the same machine.
        others = [rank for rank in ranks if machine[rank] != machine[party.rank]]
        turn = party.rank % len(others) if others else 0
        for rank in others[turn:] + others[:turn]:
            hosts, port, host = told[rank]
            here = host == host_id()
            usable = [h for h in hosts if here or not is_loopback(h)] + (["localhost"] if here else [])
            elsewhere.setdefault(name, []).append((tuple(usable), port))
    return SharedTier(storage.url, catalog, elsewhere, peers)
