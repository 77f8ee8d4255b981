"""`bytecheckpoint flush` and `cooldown`: checkpoints in more than one place. Torch is not imported."""

from __future__ import annotations

import re
from dataclasses import asdict

from ..errors import UsageError
from .show import counted, moment, print_json, print_table, progress_bar, shown, size

__all__ = ["cooldown", "flush", "parse_age"]

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str) -> float:
    """Seconds of an age such as "90", "30m", "12h", "7d" or "2w".

    Raises:
        UsageError: it is no age.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age: write 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2].lower()]


def cooldown(root: str, cold: str, *, older_than: str, keep: int, apply: bool, json: bool) -> int:
    """Move older steps to a cold folder, or show which; returns 1 when one cannot be moved."""
    from ..tiers.cooling import cool, plan_cooldown

    steps = plan_cooldown(root, cold, older_than=parse_age(older_than), keep=keep)
    if apply:
        total = sum(step.nbytes for step in steps if step.action == "move")
        with progress_bar("moving") as progress:
            moved = [0]

            def add(nbytes: int) -> None:
                moved[0] += nbytes
                if progress is not None:
                    progress(moved[0], total)

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
                moment(step.created) if step.created else "",
                size(step.nbytes) if step.nbytes else "",
                "moved" if step.done and step.action == "move" else "finished" if step.done else step.action,
                shown(step.error or step.reason),
            ]
            for step in steps
        ],
    )
    chosen = [step for step in steps if step.action in ("move", "finish")]
    if apply:
        print(f"{counted(sum(step.done for step in chosen), 'step')} moved or finished")
    else:
        print(f"{counted(len(chosen), 'step')} would be moved or finished; nothing was changed (--apply does it)")
    return int(bad)


def flush(path: str, *, replicas: bool, json: bool) -> int:
    """Flush what is left in this machine's memory; returns 1 when something is lacking or fails."""
    from ..errors import CheckpointError
    from ..tiers.machine_flush import flush as flush_step
    from ..tiers.machine_flush import unflushed

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
        line = f"{shown(report['path'])}: {report['state']}"
        if report["state"] == "failed":
            line += f": {shown(report['error'])}"
        else:
            line += f", {size(report['nbytes'])} copied in {counted(report['files'], 'file')}"
        if report.get("lacking"):
            line += f"; {counted(len(report['lacking']), 'file')} lacking, first {shown(report['lacking'][0])}"
        print(line)
    if not reports:
        print("nothing to flush")
    return int(not good)
