"""Write the view of a step behind its commit, where that has large files."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.handles import SaveHandle, SaveReport
from bytecheckpoint.saving.request import SaveRequest
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.world import World

__all__ = ["follow_with_view"]

_log = logging.getLogger("bytecheckpoint")


def follow_with_view(
    world: World,
    request: SaveRequest | Exception,
    operation: Operation,
    handle: SaveHandle,
    committed: Future[SaveReport],
) -> None:
    """Begin the files of a view behind a commit, if there are any. Set the future `viewed` when they are there.

    Args:
        world: world of the ranks, which all call this.
        request: arguments of the save.
        operation: measurements of the save.
        handle: handle of the save.
        committed: its future `committed`, which is done.
    """
    if (failure := Future.exception(committed)) is not None:  # `SaveFuture.exception` would note a retrieved failure
        handle.viewed.set_exception(failure)
        return
    report = Future.result(committed)
    if report.view != "files":
        handle.viewed.set_result(None)
        return
    assert isinstance(request, SaveRequest) and request.states.view is not None
    agreement = Agreement(world.collective, f"view/{operation.number}", request.settings.timeout)
    view, storage = request.states.view, request.storage

    def write() -> None:
        try:
            view.write(agreement, storage, report.generation)
        except BaseException as error:  # noqa: BLE001  kept for the owner of the future
            _log.warning("%s is committed without its view, which `export` writes elsewhere: %s", storage.url, error)
            handle.viewed.set_exception(error)
        else:
            handle.viewed.set_result(None)

    try:
        world.saves.submit_behind(write)
    except Exception as error:  # noqa: BLE001  kept for the owner of the future
        handle.viewed.set_exception(error)
