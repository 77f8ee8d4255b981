"""Run the verbs that work on whole checkpoints: verify, cp, diff, export, repair, flush, cooldown, rm, gc."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytecheckpoint.cli.format import (
    format_time,
    parse_age,
    parse_size,
    plural,
    print_errors,
    print_json,
    print_notes,
    print_table,
    printable,
    progress_bar,
    size_text,
)
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageUnavailableError, UsageError
from bytecheckpoint.representation.names import CATALOG_NAME, natural_order
from bytecheckpoint.storage import Storage, resolve

if TYPE_CHECKING:
    from bytecheckpoint.tools import VerifyReport

__all__ = ["cooldown", "cp", "diff", "export", "fingerprint", "flush", "gc", "repair", "rm", "verify"]

#: Findings of one step that are shown in a verification of many.
_SHOWN_FINDINGS = 3
#: Removals by place, as functions that return `Removal`s.
_Calls = dict[str, Callable[[], list[Any]]]


def verify(path: str, *, threads: int, json: bool) -> int:
    """Verify a checkpoint, or all of a run, and print the findings. Return 1 if there are any."""
    from bytecheckpoint.monitoring import delivery

    storage = resolve(path)
    steps = _steps_of_run(storage)
    code = _verify_one(storage, threads, json) if steps is None else _verify_run(storage, steps, threads, json)
    delivery.finish()  # an alert may be on its way
    return code


def _verify_one(storage: Storage, threads: int, json: bool) -> int:
    from bytecheckpoint.cli.ls import explain_missing_catalog
    from bytecheckpoint.tools import verify

    try:
        with progress_bar("verifying") as progress:
            report = verify(storage, progress, threads=threads)
    except CheckpointNotFoundError as error:
        raise explain_missing_catalog(storage, error) from None
    if json:
        print_json({"ok": report.ok, **asdict(report)})
        return int(not report.ok)
    _print_messages(report.findings, report.notes)
    print(f"{printable(report.path)}: {_verdict(report)}")
    return int(not report.ok)


def _verify_run(run: Storage, steps: Sequence[str], threads: int, json: bool) -> int:
    """Verify the steps of a run one after the other; print a line for each as soon as it is known."""
    from bytecheckpoint.tools import verify

    found: list[dict[str, Any]] = []
    for number, name in enumerate(steps, 1):
        step = resolve(f"{run.url}/{name}")
        messages: Sequence[str] = ()
        try:
            with progress_bar(f"verifying {number} of {len(steps)}") as progress:
                report = verify(step, progress, threads=threads)
        except CheckpointNotFoundError:
            continue  # removed meanwhile
        except StorageUnavailableError:  # the step may be sound, and the other steps would time out too
            raise
        except CheckpointError as error:
            found.append({"ok": False, "path": step.url, "error": str(error)})
            line = f"not readable: {printable(str(error))}"
        else:
            found.append({"ok": report.ok, **asdict(report)})
            line, messages = _verdict(report), [finding.message for finding in report.findings]
        if not json:
            print(f"{printable(name)}: {line}", flush=True)
            for message in messages[:_SHOWN_FINDINGS]:
                print(f"    {printable(message)}")
            if len(messages) > _SHOWN_FINDINGS:
                print(f"    and {len(messages) - _SHOWN_FINDINGS:,} more: bytecheckpoint verify {printable(step.url)}")
    bad = sum(not step["ok"] for step in found)
    if json:
        print_json({"ok": not bad, "path": run.url, "steps": found})
    else:
        print(
            f"{printable(run.url)}: {plural(len(found), 'checkpoint')}, {f'{bad} of them bad' if bad else 'all sound'}"
        )
    return int(bool(bad))


def _verdict(report: VerifyReport) -> str:
    verdict = "sound" if report.ok else plural(len(report.findings), "finding")
    content = f"{plural(report.tensors, 'tensor')}, {size_text(report.bytes_read)} in {plural(report.files, 'file')}"
    return f"{content}: {verdict}" + (f"; {printable(report.verdict)}" if report.verdict else "")


def _steps_of_run(storage: Storage) -> list[str] | None:
    """Return the names of the checkpoints in a folder; None if it is a checkpoint itself, or holds none."""

    def has_catalog(name: str) -> bool:
        return bool(resolve(f"{storage.url}/{name}").version(CATALOG_NAME))

    try:
        if storage.version(CATALOG_NAME):
            return None
        names = sorted(storage.folders(), key=natural_order)
        found = parallel_map(has_catalog, names, storage.capabilities.parallel_reads, "bytecheckpoint-steps")
    except StorageUnavailableError:
        if not storage.capabilities.machine_only:
            raise
        return None  # the hot tier may have the checkpoint; else reading it raises the error
    return [name for name, there in zip(names, found, strict=True) if there] or None


def cp(source: str, target: str, *, json: bool) -> int:
    """Copy a checkpoint, or all of a run. Return 1 if a step of a run cannot be copied."""
    from bytecheckpoint.cli.ls import explain_missing_catalog
    from bytecheckpoint.tools.copying import check_apart, copy

    storage, destination = resolve(source), resolve(target)
    names = _steps_of_run(storage)
    reports: list[dict[str, Any]] = []
    if names is None:
        try:
            with progress_bar("copying") as progress:
                reports.append(asdict(copy(storage, target, progress)))
        except CheckpointNotFoundError as error:
            raise explain_missing_catalog(storage, error) from None
    else:
        check_apart(storage, destination)
        held = [name for name in destination.folders() if name not in names and not name.startswith(".")]
        if held or destination.version(CATALOG_NAME):
            what = held[0] if held else CATALOG_NAME
            raise UsageError(f"{destination.url} holds {what}, which is not of {storage.url}: choose a new folder")
        for number, name in enumerate(reversed(names), 1):  # the newest, which is worth most, first
            step, place = resolve(f"{storage.url}/{name}"), f"{destination.url}/{name}"
            try:
                with progress_bar(f"copying {number} of {len(names)}") as progress:
                    reports.append(asdict(copy(step, place, progress)))
            except CheckpointNotFoundError:
                continue  # removed meanwhile
            except StorageUnavailableError:
                raise
            except CheckpointError as error:
                reports.append({"path": step.url, "target": place, "state": "failed", "error": str(error)})
    failed = {report["path"]: f"failed: {report['error']}" for report in reports if report["state"] == "failed"}
    if json:
        print_json({"ok": not failed, "steps": reports})
        return int(bool(failed))
    for report in reports:
        if report["state"] != "failed":
            content = f"{size_text(report['nbytes'])} copied, {plural(report['files'], 'file')}"
            print(f"{printable(report['target'])}: {report['state']}, {content}")
    print_errors(failed)
    return int(bool(failed))


def adopt(source: str, target: str, *, hash: bool, json: bool) -> int:
    """Adopt a checkpoint of another program."""
    from bytecheckpoint.tools import adopt

    with progress_bar("reading") as progress:
        report = adopt(source, target, hash=hash, progress=progress)
    if json:
        print_json(asdict(report))
        return 0
    print_notes(report.notes)
    read = f"{size_text(report.nbytes)} read for checksums" if hash else "no checksums"
    print(
        f"{printable(report.target)}: {report.format}, {plural(report.files, 'file')} of {printable(report.path)}, {read}"
    )
    return 0


def diff(a: str, b: str, *, layout: str | None, json: bool, **options: Any) -> int:
    """Compare two checkpoints and print the differences. Return 1 if there are any."""
    from bytecheckpoint.opening import open as open_checkpoint
    from bytecheckpoint.tools import compare

    with open_checkpoint(a, layout=layout) as first:
        report = compare(first, b, **options)
    if json:
        print_json({"a": resolve(a).url, "b": resolve(b).url, "equal": report.equal, **asdict(report)})
        return int(not report.equal)
    _print_messages(report.differences, report.notes)
    tensors = f"{plural(report.tensors, 'tensor')} ({size_text(report.bytes_compared)})"
    compared = f"{tensors} and {plural(report.values, 'plain value')}"
    print(f"{compared} compared: {'equal' if report.equal else plural(len(report.differences), 'difference')}")
    return int(not report.equal)


def fingerprint(path: str, *, layout: str | None, tensors: bool, recompute: bool, json: bool) -> int:
    """Print the fingerprint of each state of a checkpoint, or of each tensor."""
    from bytecheckpoint.tools import fingerprint

    found = fingerprint(path, layout=layout, recompute=recompute)
    if json:
        print_json({"path": resolve(path).url, **asdict(found)})
        return 0
    for name, digest in (found.tensors if tensors else found.states).items():
        print(f"{digest}  {printable(name)}")
    return 0


def _print_messages(found: Iterable[Any], notes: Iterable[str]) -> None:
    for one in found:
        print(printable(one.message))
    print_notes(notes)


def export(src: str, dst: str, *, max_shard_size: str, layout: str | None, json: bool, **options: Any) -> int:
    """Export a checkpoint. Return 1 if the conversion made finite values infinite."""
    from bytecheckpoint.opening import open as open_checkpoint
    from bytecheckpoint.tools import export

    limit, layouts = parse_size(max_shard_size), _with_sizes(layout, options["files_from"])
    with progress_bar("exporting") as progress, open_checkpoint(src, layout=layouts) as source:
        report = export(source, dst, max_shard_bytes=limit, progress=progress, **options)
    if json:
        print_json(asdict(report))
        return int(bool(report.overflowed))
    print_notes(f"{key} is a plain value and was not exported" for key in report.skipped)
    print_notes(f"{key} does not belong to the adapter and was not exported" for key in report.left_out)
    print_notes(
        f"{name} holds values too large for {options['dtype']}: they became infinite" for name in report.overflowed
    )
    content = f"{plural(report.tensors, 'tensor')}, {size_text(report.nbytes)} in {plural(len(report.files), 'file')}"
    print(f"{printable(report.path)}: {content}")
    return int(bool(report.overflowed))


def repair(path: str, *, force: bool, json: bool) -> int:
    """Rebuild the catalog. Return 1 if it names damaged blocks (only with force)."""
    from bytecheckpoint.tools import repair

    with progress_bar("verifying") as progress:
        report = repair(path, force=force, progress=progress)
    if json:
        print_json(asdict(report))
        return int(bool(report.findings))
    _print_messages(report.findings, report.notes)
    done = f"catalog rebuilt from save {report.generation}" if report.written else "the catalog is sound"
    print(f"{printable(report.path)}: {done}")
    return int(bool(report.findings))


def cooldown(root: str, cold: str, *, older_than: str, keep: int, apply: bool, json: bool) -> int:
    """Move older steps to a cold folder, or print the plan. Return 1 if a step cannot be moved."""
    from bytecheckpoint.tiers.cooldown import cool, plan_cooldown

    steps = plan_cooldown(root, cold, older_than=parse_age(older_than), keep=keep)
    if apply:
        total = sum(step.nbytes for step in steps if step.action == "move")
        with progress_bar("moving") as progress:
            moved = 0

            def add(nbytes: int) -> None:
                nonlocal moved
                moved += nbytes
                if progress is not None:
                    progress(moved, total)

            steps = [cool(step, add) for step in steps]
    bad = any(step.error or step.action == "skip" for step in steps)
    if json:
        print_json({"ok": not bad, "applied": apply, "steps": [asdict(step) for step in steps]})
        return int(bad)
    print_table(
        ["name", "saved", "size>", "action", "reason"],
        [
            [
                step.name,
                format_time(step.created) if step.created else "",
                size_text(step.nbytes) if step.nbytes else "",
                "moved" if step.done and step.action == "move" else "finished" if step.done else step.action,
                printable("failed" if step.error else step.reason),
            ]
            for step in steps
        ],
    )
    print_errors({step.path: step.error for step in steps if step.error})
    chosen = [step for step in steps if step.action in ("move", "finish")]
    if apply:
        print(f"{plural(sum(step.done for step in chosen), 'step')} moved or finished")
    else:
        print(f"{plural(len(chosen), 'step')} would be moved or finished; nothing was changed (--apply does it)")
    return int(bad)


def flush(path: str, *, replicas: bool, json: bool) -> int:
    """Flush the steps that a job left in this machine's hot tier. Return 1 if a step is incomplete or fails."""
    from bytecheckpoint.tiers.flush.machine import flush as flush_step
    from bytecheckpoint.tiers.flush.machine import unflushed

    reports = []
    for step in unflushed(path):
        try:
            reports.append(asdict(flush_step(step, replicas=replicas)))
        except CheckpointError as error:
            reports.append({"path": step.durable.url, "state": "failed", "error": str(error)})
    good = all(report["state"] in ("committed", "already there") for report in reports)
    if json:
        print_json({"ok": good, "steps": reports})
        return int(not good)
    for report in reports:
        if report["state"] != "failed":
            line = f"{printable(report['path'])}: {report['state']}"
            line += f", {size_text(report['nbytes'])} copied in {plural(report['files'], 'file')}"
            if report["lacking"]:
                line += f"; {plural(len(report['lacking']), 'file')} lacking, first {printable(report['lacking'][0])}"
            print(line)
    print_errors({report["path"]: f"failed: {report['error']}" for report in reports if report["state"] == "failed"})
    if not reports:
        print("nothing to flush")
    return int(not good)


def rm(paths: Sequence[str], *, cold: bool, dry_run: bool, json: bool) -> int:
    """Remove checkpoints. Return 1 if one cannot be removed, or a file of that name stays."""
    from bytecheckpoint.tools import remove

    calls: _Calls = {path: partial(remove, path, cold=cold, dry_run=dry_run) for path in paths}
    return _run(calls, dry_run=dry_run, json=json, whole=True)


def gc(paths: Sequence[str], *, older_than: str, dry_run: bool, json: bool) -> int:
    """Remove garbage. Return 1 if a place cannot be looked at."""
    from bytecheckpoint.tools import collect_garbage, collect_hot_garbage
    from bytecheckpoint.tools.subject import refuse_other_programs

    age = parse_age(older_than)

    def collect(path: str) -> list[Any]:
        storage = resolve(path)
        try:
            found = collect_garbage(path, older_than=age, dry_run=dry_run)
        except CheckpointNotFoundError:
            refuse_other_programs(storage, "gc")
            raise
        if not found and not storage.version(CATALOG_NAME) and _steps_of_run(storage) is None:
            refuse_other_programs(storage, "gc")
        return found

    calls: _Calls = {path: partial(collect, path) for path in paths}
    calls["the hot tier of this machine"] = partial(collect_hot_garbage, older_than=age, dry_run=dry_run)
    return _run(calls, dry_run=dry_run, json=json)


def _run(calls: _Calls, *, dry_run: bool, json: bool, whole: bool = False) -> int:
    """Run the calls, each for a place; print what they remove. An error of one does not stop the others.

    Returns:
        1 if there was an error, or something stays although the user wants the whole of it removed.
    """
    found: list[Any] = []
    errors: dict[str, str] = {}
    for place, call in calls.items():
        try:
            found += call()
        except CheckpointError as error:
            errors[place] = str(error)
    code = int(bool(errors) or (whole and any(f.kept for f in found)))
    if json:
        print_json({"ok": not errors, "dry_run": dry_run, "removed": [asdict(f) for f in found], "errors": errors})
        return code
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
    print_errors(errors)
    gone = [f for f in found if not f.kept]
    size = size_text(sum(f.nbytes for f in gone))
    print(f"{plural(sum(f.files for f in gone), 'file')} ({size}) {'would be removed' if dry_run else 'removed'}")
    return code


def _with_sizes(layout: str | None, folder: str | None) -> Any:
    """Return the layouts that a user names, with the sizes in the `config.json` of a folder, which others' runs lack."""
    config = Path(folder or "", "config.json")
    if layout in (None, "auto") or folder is None or not config.is_file():
        return layout
    from bytecheckpoint.layouts.config import flattened
    from bytecheckpoint.layouts.layout import find_all

    try:
        sizes = flattened("hf", json_text.loads(config.read_bytes()))
    except (ValueError, AttributeError):
        raise UsageError(f"{config} is no JSON object: give a folder of Hugging Face") from None
    return [found.with_sizes(sizes) for found in find_all(layout)]
