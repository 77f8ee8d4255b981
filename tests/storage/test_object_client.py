"""Facts that `errors.py` reads from the errors of the installed client library, for retries and messages.

A version of the library that words its errors otherwise fails here; pyproject.toml excludes versions that nobody has tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import obstore
import obstore.store
import pytest

from bytecheckpoint.storage.objects.errors import Facts, facts_of
from tests.servers.fault_proxy import FaultProxy, HttpFault, fault_proxy, s3_error
from tests.servers.peers import garbles, hangs_up, silent
from tests.support.ranks import attempt

CALLS: dict[str, Callable[[Any], object]] = {
    "get": lambda store: obstore.get(store, "x"),
    "put": lambda store: obstore.put(store, "x", b"1", use_multipart=False),
    "parts": lambda store: obstore.put(store, "x", bytes(11 << 20), chunk_size=5 << 20),
    "head": lambda store: obstore.head(store, "x"),
    "list": lambda store: obstore.list_with_delimiter(store, "x"),
    "delete": lambda store: obstore.delete(store, ["x"]),
}
#: Statuses that the client repeats by itself.
REPEATED = (408, 429, 500, 501, 503, 507)


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with fault_proxy("http://127.0.0.1:1") as made:
        yield made


@pytest.fixture
def answer(proxy: FaultProxy) -> HttpFault:
    """The answer to every request."""
    proxy.rules.clear()
    return proxy.add(lambda request: True, status=200, times=-1)


def store(endpoint: str, **options: Any) -> Any:
    retry: Any = {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=60),
        "backoff": {
            "init_backoff": timedelta(milliseconds=1),
            "max_backoff": timedelta(milliseconds=2),
            "base": 2,
        },
    }
    client: Any = {"allow_http": True, "timeout": timedelta(seconds=5)}
    keys = {} if options else {"access_key_id": "k", "secret_access_key": "s"}
    return obstore.store.S3Store(
        "b", endpoint=endpoint, region="us-east-1", client_options=client, retry_config=retry, **keys, **options
    )


def failed(endpoint: str, call: str = "get", **options: Any) -> tuple[BaseException, Facts]:
    raised = attempt(CALLS[call], store(endpoint, **options))
    assert isinstance(raised, BaseException), raised
    return raised, facts_of(raised)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, *REPEATED])
def test_answers(proxy: FaultProxy, answer: HttpFault, status: int, call: str) -> None:
    answer.status, answer.body = status, s3_error("SomeCode", "some words")
    _, facts = failed(proxy.endpoint, call)
    assert facts.status == status
    assert facts.transient == (status in (408, 429, 500, 503))
    if call != "head":  # which has no body
        assert facts.code == "SomeCode" and facts.reason == "SomeCode: some words"
    if status in REPEATED and call in ("get", "head", "list"):
        assert facts.retries == 2
    assert 0 < facts.elapsed < 60
    assert not facts.credentials


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, obstore.exceptions.UnauthenticatedError),
        (403, obstore.exceptions.PermissionDeniedError),
        (404, FileNotFoundError),
        (412, obstore.exceptions.PreconditionError),
    ],
)
@pytest.mark.parametrize("call", ["get", "head", "put"])
def test_typed_errors(proxy: FaultProxy, answer: HttpFault, status: int, kind: type[Exception], call: str) -> None:
    answer.status = status
    raised, facts = failed(proxy.endpoint, call)
    assert isinstance(raised, kind)
    assert facts_of(kind("in other words")).status == facts.status == status


def test_one_object_of_a_bulk_deletion(proxy: FaultProxy, answer: HttpFault) -> None:
    error = "<Error><Key>x</Key><Code>SlowDown</Code><Message>so it is</Message></Error>"
    answer.body = f'<?xml version="1.0"?><DeleteResult>{error}</DeleteResult>'.encode()
    _, facts = failed(proxy.endpoint, "delete")
    assert facts.code == "SlowDown" and facts.transient


@pytest.mark.parametrize("peer", [silent, hangs_up, garbles])
def test_no_answer(peer: Any) -> None:
    with peer() as address:
        _, facts = failed(f"http://{address}")
    assert facts.transient and facts.status == 0
    broke = ("the connection broke", "Connection reset by peer")
    assert facts.reason in (("no answer in time",) if peer is silent else broke)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [("http://127.0.0.1:1", "Connection refused"), ("http://no-such-host.invalid:80", "dns error")],
)
def test_no_server(endpoint: str, reason: str) -> None:
    _, facts = failed(endpoint)
    assert facts.transient and facts.status == 0 and facts.reason == reason


@pytest.mark.parametrize(("status", "transient"), [(403, False), (500, True)])
def test_the_search_for_credentials(
    proxy: FaultProxy, answer: HttpFault, status: int, transient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be taken for an answer of the store."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    answer.status = status
    _, facts = failed("http://127.0.0.1:1", metadata_endpoint=proxy.endpoint)
    assert facts.credentials and facts.status == status and facts.transient == transient
