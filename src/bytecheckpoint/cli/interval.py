"""`bytecheckpoint plan-interval`. Torch is not imported."""

from __future__ import annotations

from dataclasses import asdict

from bytecheckpoint.cli.format import print_json
from bytecheckpoint.cli.tiers import parse_age
from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager.interval import plan_interval as plan

__all__ = ["plan_interval"]


def plan_interval(
    *,
    stall: str,
    write: str,
    mtbf: str,
    machines: int,
    restart: str,
    step_time: str | None,
    most_stall: float | None,
    json: bool,
) -> int:
    """Print the interval that loses least."""
    between = parse_age(mtbf) / machines
    found = plan(parse_age(stall), parse_age(write), between, restart=parse_age(restart), most_stall=most_stall)
    steps = None
    if step_time is not None:
        if (seconds := parse_age(step_time)) <= 0:
            raise UsageError(f"--step-time {step_time}: give a time above 0")
        steps = max(1, round(found.seconds / seconds))
    if json:
        print_json({**asdict(found), "steps": steps, "seconds_between_failures": between})
        return 0
    every = f"save every {found.seconds:.1f} s" + (f", which is every {steps} steps" if steps else "")
    print(f"{every} (decided by: {found.why})")
    print(f"stalls cost {found.stall_share:.2%} of the time")
    print(f"failures, one in {between / 3600:.2f} h, undo {found.lost_share:.2%}")
    print(f"training that counts: {found.effective:.2%}")
    return 0
