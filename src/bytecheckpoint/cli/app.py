"""Define the grammar of the command line. Each verb returns a job for `main.run`, and imports its code itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from bytecheckpoint._version import __version__

__all__ = ["app"]

app = typer.Typer(
    help="Look into checkpoints, verify, compare, export and repair them. Exit status: 0 fine, 1 findings, "
    "2 not readable as a checkpoint, or wrong usage.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Path = Annotated[str, typer.Argument(metavar="PATH", help="Folder or URL of one checkpoint.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="Layout by which the first checkpoint is seen: a name, a *.layout file, auto; or several, joined by commas.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]
# Argument and options of the verbs about the metrics of a run.
Root = Annotated[str, typer.Argument(metavar="ROOT", help="Folder or URL of a run.", show_default=False)]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="Bandwidth of the storage for all ranks together, per second: 40GB (see also `measure`)."),
]
Mtbf = Annotated[str | None, typer.Option(help="Mean time between two failures: 4h; adds the expected ETTR.")]
Rules = Annotated[str, typer.Option(help="File of rules for alerts; default: the setting `alerts`.")]
Job = Callable[[], int]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bytecheckpoint {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def ls(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of them.")] = ".",
    json: Json = False,
) -> Job:
    """List the checkpoints of a folder, or the states of one checkpoint."""
    from bytecheckpoint.cli.ls import ls

    return partial(ls, path, json=json)


@app.command()
def inspect(
    path: Path,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GLOB]...", help="Show only keys that match, e.g. 'model/layers.0.*'."),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Show plain values too.")] = False,
    boxes: Annotated[bool, typer.Option("--boxes", help="Show every stored box with its file and bytes.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="With --values: rank whose values are shown.")] = None,
    layout: LayoutOption = None,
    json: Json = False,
) -> Job:
    """Show tensors (dtype, shape, bytes, boxes), the layout of the save, and the bytes of each writer."""
    from bytecheckpoint.cli.inspect import inspect

    return partial(inspect, path, patterns or [], values=values, boxes=boxes, rank=rank, layout=layout, json=json)


@app.command()
def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Folder or URL of one checkpoint, or of a run.", show_default=False)
    ],
    threads: Annotated[int, typer.Option(min=0, help="Concurrent reads; 0: the default.")] = 0,
    json: Json = False,
) -> Job:
    """Check every byte of a checkpoint, or of all checkpoints of a run, against its checksums."""
    from bytecheckpoint.cli.tools import verify

    return partial(verify, path, threads=threads, json=json)


@app.command()
def cp(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A checkpoint, or a folder of them.", show_default=False)
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A new folder, in any storage.", show_default=False)
    ],
    json: Json = False,
) -> Job:
    """Copy a checkpoint, or all of a run, to another folder or storage; every byte is verified on its way."""
    from bytecheckpoint.cli.tools import cp

    return partial(cp, source, destination, json=json)


@app.command()
def adopt(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A checkpoint of another program.", show_default=False)
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A new folder, in any storage.", show_default=False)
    ],
    hash: Annotated[
        bool, typer.Option("--hash/--no-hash", help="Read all files once for checksums, or headers only.")
    ] = True,
    json: Json = False,
) -> Job:
    """Write a small checkpoint that names the files of another program's: every tool takes it, and verifies them."""
    from bytecheckpoint.cli.tools import adopt

    return partial(adopt, source, destination, hash=hash, json=json)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    rtol: Annotated[float, typer.Option(help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(help="Absolute tolerance.")] = 0.0,
    fingerprints: Annotated[
        bool,
        typer.Option(
            "--fingerprints/--read-all", help="Take equal fingerprints in both catalogs as proof, or read all."
        ),
    ] = True,
    layout: LayoutOption = None,
    json: Json = False,
) -> Job:
    """Compare two checkpoints tensor by tensor; bit by bit unless a tolerance is given."""
    from bytecheckpoint.cli.tools import diff

    return partial(diff, a, b, rtol=rtol, atol=atol, fingerprints=fingerprints, layout=layout, json=json)


@app.command()
def fingerprint(
    path: Path,
    tensors: Annotated[bool, typer.Option("--tensors", help="Show each tensor instead of each state.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Read all tensors, also if the save made one.")
    ] = False,
    layout: LayoutOption = None,
    json: Json = False,
) -> Job:
    """Show a fingerprint of each state: equal for equal tensors at any layout, in any files and programs."""
    from bytecheckpoint.cli.tools import fingerprint

    return partial(fingerprint, path, layout=layout, tensors=tensors, recompute=recompute, json=json)


@app.command()
def export(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint.", show_default=False)],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="A new or empty folder; for torch a file.", show_default=False)
    ],
    format: Annotated[
        str,
        typer.Option(
            help="hf (safetensors), dcp (of torch.distributed), torchtitan, torch (torch.save), deepspeed-universal or "
            "megatron."
        ),
    ] = "hf",
    state: Annotated[
        str | None, typer.Option(help="Name of the state to export alone; by default the model for hf, else all.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating tensors, e.g. to bfloat16.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Bytes per file, e.g. 5GB or 2GiB.")] = "5GB",
    adapter: Annotated[str | None, typer.Option(help="Name of the adapter (PEFT) to export alone.")] = None,
    files_from: Annotated[
        str | None, typer.Option(help="Local folder of a model, whose files beside the weights are copied.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace weights that are there: hf and torch.")] = False,
    layout: LayoutOption = None,
    json: Json = False,
) -> Job:
    """Write a checkpoint for other programs: Hugging Face, DCP, torch.save, DeepSpeed, Megatron; in bounded memory."""
    from bytecheckpoint.cli.tools import export

    return partial(
        export, src, dst, format=format, state=state, dtype=dtype, max_shard_size=max_shard_size, adapter=adapter,
        files_from=files_from, force=force, layout=layout, json=json,
    )  # fmt: skip


@app.command()
def repair(
    path: Path,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a sound catalog; accept damaged blocks and unreadable files.")
    ] = False,
    json: Json = False,
) -> Job:
    """Rebuild a lost or damaged catalog from the storage files."""
    from bytecheckpoint.cli.tools import repair

    return partial(repair, path, force=force, json=json)


@app.command()
def flush(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A step, or a folder of them, with or without tier+.", show_default=False),
    ],
    replicas: Annotated[
        bool, typer.Option("--replicas", help="Also flush this machine's copies of lost machines' files.")
    ] = False,
    json: Json = False,
) -> Job:
    """Copy steps that a job left in this machine's memory (`tier+...`) to their durable storage."""
    from bytecheckpoint.cli.tools import flush

    return partial(flush, path, replicas=replicas, json=json)


@app.command()
def rm(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints.", show_default=False)],
    cold: Annotated[bool, typer.Option("--cold", help="Also remove their files in a cold storage.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> Job:
    """Remove checkpoints, and the files of killed saves at their paths. `tier+...`: this machine's copy too."""
    from bytecheckpoint.cli.tools import rm

    return partial(rm, paths, cold=cold, dry_run=dry_run, json=json)


@app.command()
def gc(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Checkpoints, or folders of them.")
    ] = None,
    older_than: Annotated[str, typer.Option(help="Least age: 30m, 12h, 7d, 2w.")] = "1d",
    dry_run: DryRun = False,
    json: Json = False,
) -> Job:
    """Remove the files of killed saves, and flushed steps from this machine's memory (all runs)."""
    from bytecheckpoint.cli.tools import gc

    return partial(gc, paths or [], older_than=older_than, dry_run=dry_run, json=json)


@app.command("plan-interval")
def plan_interval(
    stall: Annotated[str, typer.Option(help="Time for which a save stops the training: 0.5s.", show_default=False)],
    write: Annotated[
        str, typer.Option(help="Time from the beginning of a save to its commit: 40s.", show_default=False)
    ],
    mtbf: Annotated[str, typer.Option(help="Mean time between two failures: 4h.", show_default=False)],
    machines: Annotated[int, typer.Option(min=1, help="Number of machines, if --mtbf is that of one machine.")] = 1,
    restart: Annotated[str, typer.Option(help="Time from a failure until the training continues.")] = "0s",
    step_time: Annotated[
        str | None, typer.Option(help="Time of one training step; adds the interval in steps.")
    ] = None,
    most_stall: Annotated[
        float | None, typer.Option(help="Bound on the share of the time in stalls, e.g. 0.03.")
    ] = None,
    json: Json = False,
) -> Job:
    """Find the interval between saves at which stalls and lost work cost least together."""
    from bytecheckpoint.cli.runs import plan_interval

    return partial(
        plan_interval,
        stall=stall,
        write=write,
        mtbf=mtbf,
        machines=machines,
        restart=restart,
        step_time=step_time,
        most_stall=most_stall,
        json=json,
    )


@app.command()
def report(
    root: Root,
    newest: Annotated[
        int | None, typer.Option(min=1, help="Number of saves and loads to read, the newest ones.")
    ] = None,
    bandwidth: Bandwidth = None,
    mtbf: Mtbf = None,
    rules: Rules = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Show all operations, stragglers and alerts, not only the last and the worst.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write a page for a browser instead: report.html; -: stdout."
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto instead: trace.json; -: stdout.")
    ] = None,
    json: Json = False,
) -> Job:
    """Show the metrics of a run: operations, phases, stragglers, alerts, and findings with advice."""
    from bytecheckpoint.cli.runs import make_reporter, report

    reporter = make_reporter(rules, bandwidth, mtbf)
    return partial(
        report, root, newest=newest, reporter=reporter, everything=everything, output=output, trace=trace, json=json
    )


@app.command()
def compare(
    root: Root, other: Annotated[str, typer.Argument(help="Folder or URL of another run.")], json: Json = False
) -> Job:
    """Show the metrics of two runs side by side: medians of saves and loads and of their phases."""
    from bytecheckpoint.cli.runs import compare

    return partial(compare, root, other, json=json)


@app.command()
def measure(
    root: Root,
    size: Annotated[str, typer.Option(help="Bytes to write, e.g. 4GiB.")] = "1GiB",
    threads: Annotated[int, typer.Option(min=1, help="Number of files to write and read at once.")] = 8,
    json: Json = False,
) -> Job:
    """Measure the bandwidth of the storage of a run; reports compare saves and loads with it."""
    from bytecheckpoint.cli.runs import measure

    return partial(measure, root, size=size, threads=threads, json=json)


@app.command()
def monitor(
    root: Root,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str,
        typer.Option(
            envvar="BYTECHECKPOINT_MONITOR_TOKEN",
            show_envvar=True,
            help="Secret that a browser asks for as a password. Other users of this machine can see the option, but "
            "not the variable.",
        ),
    ] = "",
    bandwidth: Bandwidth = None,
    mtbf: Mtbf = None,
    rules: Rules = "",
    json: Json = False,
) -> Job:
    """Serve the page of a run, with the progress of running saves and loads. It only reads."""
    from bytecheckpoint.cli.runs import make_reporter, monitor

    reporter = make_reporter(rules, bandwidth, mtbf)
    return partial(monitor, root, reporter=reporter, host=host, port=port, token=token, json=json)


layout_app = typer.Typer(help="Check layouts, which state how tensors of one naming lie in those of another.")
app.add_typer(layout_app, name="layout")


@layout_app.command("check")
def layout_check(
    layout: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT", help="A *.layout file, or the name of one that is built in.", show_default=False
        ),
    ],
    left: Annotated[str | None, typer.Option(metavar="PATH", help="Checkpoint of the left side.")] = None,
    right: Annotated[str | None, typer.Option(metavar="PATH", help="Checkpoint of the right side.")] = None,
    left_state: Annotated[str, typer.Option(help="State of the left checkpoint.")] = "model",
    right_state: Annotated[str, typer.Option(help="State of the right checkpoint.")] = "model",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SIDE.KEY=VALUE", help="A key of a configuration.")
    ] = None,
    json: Json = False,
) -> Job:
    """Check the text of a layout, and whether it fits the tensors of checkpoints. No bytes of tensors are read."""
    from bytecheckpoint.cli.layout import check

    states = (left_state, right_state)
    return partial(check, layout, left=left, right=right, states=states, settings=settings or [], json=json)


@layout_app.command("explain")
def layout_explain(
    layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="A layout.", show_default=False)],
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint.", show_default=False)],
    tensor: Annotated[str, typer.Argument(metavar="TENSOR", help="A tensor of either side.", show_default=False)],
    state: Annotated[str, typer.Option(help="State of the checkpoint.")] = "model",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SIDE.KEY=VALUE", help="A key of a configuration.")
    ] = None,
    json: Json = False,
) -> Job:
    """Print of which parts a tensor consists, and where the bytes of each part lie. No bytes of tensors are read."""
    from bytecheckpoint.cli.layout import explain

    return partial(explain, layout, path, tensor, state=state, settings=settings or [], json=json)


@layout_app.command("show")
def layout_show(
    layout: Annotated[
        str | None, typer.Argument(metavar="[LAYOUT]", help="A layout; default: list those that are built in.")
    ] = None,
    json: Json = False,
) -> Job:
    """Print a layout, or the list of those that are built in."""
    from bytecheckpoint.cli.layout import show

    return partial(show, layout, json=json)


@app.command()
def cooldown(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A folder of steps.", show_default=False)],
    cold: Annotated[str, typer.Argument(metavar="COLD", help="Folder or URL for older steps.", show_default=False)],
    older_than: Annotated[str, typer.Option(help="Least age of a step to move: 30m, 12h, 7d, 2w.")] = "7d",
    keep: Annotated[int, typer.Option(min=1, help="Number of newest steps that stay in any case.")] = 1,
    apply: Annotated[bool, typer.Option("--apply/--dry-run", help="Move the steps, or only show the plan.")] = False,
    json: Json = False,
) -> Job:
    """Move older steps to a cold storage; their paths keep working. Only shows the plan unless --apply is given."""
    from bytecheckpoint.cli.tools import cooldown

    return partial(cooldown, root, cold, older_than=older_than, keep=keep, apply=apply, json=json)
