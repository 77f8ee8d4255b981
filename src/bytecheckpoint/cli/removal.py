"""`bytecheckpoint rm` and `bytecheckpoint gc`. Torch is not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bytecheckpoint.cli.format import plural, print_json, print_table, printable, size_text
from bytecheckpoint.cli.tiers import parse_age
from bytecheckpoint.errors import CheckpointError

__all__ = ["gc", "rm"]

#: What to do about each place; returns `Removal`s.
_Calls = dict[str, Callable[[], list[Any]]]


def rm(paths: Sequence[str], *, cold: bool, dry_run: bool, json: bool) -> int:
    """Remove checkpoints. Return 1 if one cannot be removed."""
    from bytecheckpoint.tools.removal import remove_checkpoint

    calls: _Calls = {path: partial(remove_checkpoint, path, cold=cold, dry_run=dry_run) for path in paths}
    return _run(calls, dry_run=dry_run, json=json)


def gc(paths: Sequence[str], *, older_than: str, dry_run: bool, json: bool) -> int:
    """Remove garbage. Return 1 if a place cannot be looked at."""
    from bytecheckpoint.tools.removal import collect_garbage, collect_hot_garbage

    age = parse_age(older_than)
    calls: _Calls = {path: partial(collect_garbage, path, older_than=age, dry_run=dry_run) for path in paths}
    calls["the hot tier of this machine"] = partial(collect_hot_garbage, older_than=age, dry_run=dry_run)
    return _run(calls, dry_run=dry_run, json=json)


def _run(calls: _Calls, *, dry_run: bool, json: bool) -> int:
    """Run the calls, each for a place; print what they remove. An error of one does not stop the others."""
    found, errors = [], {}
    for place, call in calls.items():
        try:
            found += call()
        except CheckpointError as error:
            errors[place] = str(error)
    if json:
        print_json({"ok": not errors, "dry_run": dry_run, "removed": [asdict(f) for f in found], "errors": errors})
        return int(bool(errors))
    if found:
        action = "would go" if dry_run else "removed"
        print_table(
            ["path", "what", "files>", "size>", "action", "reason"],
            [
                [
                    f.path,
                    f.what,
                    str(f.files),
                    size_text(f.nbytes),
                    "kept" if f.kept else action,
                    f.kept,
                ]
                for f in found
            ],
        )
    for place, message in errors.items():
        print(f"{printable(place)}: {printable(message)}")
    gone = [f for f in found if not f.kept]
    size = size_text(sum(f.nbytes for f in gone))
    print(f"{plural(sum(f.files for f in gone), 'file')} ({size}) {'would be removed' if dry_run else 'removed'}")
    return int(bool(errors))
