"""Mutations of a checkpoint, each opened, loaded and verified in a process with little memory and little time.

This file is also the program of the process that forks those processes: it imports torch once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.representation.checksums import block_sums
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import resealed, with_footer
from tests.support.processes import environment
from tests.support.programs import forked

__all__ = ["run_mutations"]

CATALOG = "metadata.parquet"
GIB = 1 << 30
SECONDS = 20
_BATCH = 100
#: An error about a sound checkpoint that does not fit names a file, or a tensor of a state.
_PLACES = (CATALOG, ".safetensors", "model/", "optimizer/", "optimizer: ", "scheduler", "extra_states")
_HOSTILE: list[Any] = [
    *(-1, 0, 1, 3, 2**20, 2**31 - 1, 2**31, 2**40, 2**62 - 1, 2**62, 2**64, 10**400, 0.5, 1e308, None, True),
    *("", "x", "model", "0" * 16, "f" * 5000, "file:///etc/passwd", "../../x", "x://y/z", "float64", "uint8"),
    *([], {}, [[]], {"a": []}, [0] * 7, json.loads("[" * 50 + "]" * 50)),
]


def run_mutations(folder: Path, seed: int, count: int) -> list[str]:
    """Mutate a checkpoint in `folder`, which is made first, `count` times; return the outcomes that are wrong."""
    limits = environment() | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    program = forked(__file__, folder, seed, count)
    done = subprocess.run(program, env=limits, capture_output=True, text=True, timeout=60 + 3 * count, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["outcomes"] == count, report
    assert count < 60 or len(report["kinds"]) == len(MUTATIONS), report["kinds"]
    return list(report["wrong"])


def states() -> dict[str, Any]:
    """Return live states of every sort, with values that `right` knows."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"numbers": list(range(50)), "table": torch.arange(3000.0), "nested": {"a": ("b", 2**80)}}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra_states": extra}


def blank(values: dict[str, Any]) -> dict[str, Any]:
    """Return states as `values`, with other tensors."""
    made = states()
    for parameter in made["model"].parameters():
        parameter.data.zero_()
    made["extra_states"] = {}
    return made


def right(loaded: dict[str, Any], saved: dict[str, Any], *, plain: bool) -> bool:
    """Return whether all tensors, and plain values if `plain`, are the saved ones."""
    pairs = zip(loaded["model"].parameters(), saved["model"].parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    if plain:
        moments = zip(loaded["optimizer"].state.values(), saved["optimizer"].state.values(), strict=True)
        same &= all(torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in moments)
        same &= loaded["extra_states"].get("numbers") == saved["extra_states"]["numbers"]
        same &= torch.equal(loaded["extra_states"].get("table", torch.empty(0)), saved["extra_states"]["table"])
    return same


# ---- mutations: of the checkpoint in a folder, by a source of random numbers ----


def mutate_footer(folder: Path, draw: random.Random) -> None:
    """Replace a value somewhere in the footer's JSON."""

    def change(footer: dict[str, Any]) -> None:
        place: Any = footer
        for _ in range(draw.randrange(1, 5)):
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not (isinstance(place[key], dict | list) and place[key]) or draw.random() < 0.2:
                break
            place = place[key]
        if draw.random() < 0.1:
            place.pop(key)
        else:
            place[key] = draw.choice(_HOSTILE)

    rewrite(folder, lambda data: with_footer(data, change))


def mutate_columns(folder: Path, draw: random.Random) -> None:
    """Replace a cell, or repeat or drop rows."""

    def change(data: bytes) -> bytes:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
        rows = table.to_pydict()
        name, row = draw.choice(list(rows)), draw.randrange(len(table))
        cell, field = rows[name][row], table.schema.field(name).type
        numbers = [n for n in _HOSTILE if type(n) is int and -(2**31) <= n < 2**31 and (n >= 0 or name != "sums")]
        if draw.random() < 0.2:
            count = draw.choice([0, 2, 1000])
            rows = {
                column: [*values[:row], *[values[row]] * count, *values[row + 1 :]] for column, values in rows.items()
            }
        elif isinstance(cell, list):
            rows[name][row] = draw.choice([[], [*cell, 1], cell[:-1], [draw.choice(numbers) for _ in cell], [1] * 65])
        elif isinstance(cell, bool):
            rows[name][row] = not cell
        elif isinstance(cell, int):
            wide = [2**40, 2**62 - 1] if field == pa.int64() else []
            rows[name][row] = draw.choice([*numbers, *wide, cell + 1, cell - 1])
        else:
            rows[name][row] = draw.choice([text for text in _HOSTILE if isinstance(text, str)])
        schema = pa.schema([(column, plain(table.schema.field(column).type)) for column in table.schema.names])
        changed = pa.Table.from_pydict(rows, schema=schema)
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, schema, store_schema=False) as writer:
            writer.write_table(changed)
            writer.add_key_value_metadata(
                {b"bytecheckpoint": pq.read_metadata(pa.BufferReader(data)).metadata[b"bytecheckpoint"]}
            )
        parquet = sink.getvalue().to_pybytes()
        at = len(parquet) - 8 - struct.unpack("<I", parquet[-8:-4])[0]
        return resealed(parquet[:at] + b"bytecheckpoint01" + bytes(16) + parquet[at:])

    rewrite(folder, change)


def plain(arrow: Any) -> Any:
    """Return a type without dictionaries."""
    return arrow.value_type if pa.types.is_dictionary(arrow) else arrow


def mutate_bytes(folder: Path, draw: random.Random) -> None:
    """Change bytes of the catalog, cut or extend it, with a right seal or without."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(changed) - 9)
            changed[at : at + draw.choice([1, 1, 8])] = bytes(
                draw.choice([0, 255, draw.randrange(256)]) for _ in range(8)
            )
        how = draw.randrange(4)
        if how == 3:
            return bytes(changed[: draw.randrange(len(changed))]) + bytes(draw.choice([0, 0, 5000]))
        try:
            return resealed(bytes(changed)) if how else bytes(changed)
        except struct.error:
            return bytes(changed)

    rewrite(folder, change)


def mutate_sizes(folder: Path, draw: random.Random) -> None:
    """Make a file long and sparse, or short."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    size = file.stat().st_size
    tail = file.read_bytes()[-2000:]
    os.truncate(file, draw.choice([0, 1, 8, size // 2, size - 1, size + 1, 2**28 + 1, 12 * GIB, 2**42]))
    if draw.random() < 0.5 and file.stat().st_size > size:
        with file.open("r+b") as grown:
            grown.seek(-len(tail), os.SEEK_END)
            grown.write(tail)


def mutate_catalog(folder: Path, draw: random.Random, *, groups: bool = False) -> None:
    """Replace a number of a column or of the table of files, and write the catalog as a writer without checks would."""
    catalog = decode((folder / CATALOG).read_bytes())
    changed = catalog if groups and draw.random() < 0.1 else other_catalog(catalog, draw)
    if groups:
        with tuned(catalog_group_bytes=200):
            rewrite(folder, lambda _: encode(changed, check=False))
        if draw.random() < 0.5:
            mutate_bytes(folder, draw)
    else:
        rewrite(folder, lambda _: encode(changed, check=False))


def other_catalog(catalog: Catalog, draw: random.Random) -> Catalog:
    """Return the catalog with one number replaced."""
    number = draw.choice([n for n in _HOSTILE if type(n) is int and -1 <= n < 2**62])
    name = draw.choice(
        ["file", "byte_offset", "byte_length", "shapes", "owner", "lengths", "offsets", "files", "files"]
    )
    if name == "files":
        place = draw.randrange(len(catalog.files))
        field = draw.choice(["size", "data_offset", "block_bytes", "rank", "name", "generation"])
        value: Any = (
            number if field in ("size", "data_offset", "block_bytes", "rank") else draw.choice(["", "x/y", "s3://b/c"])
        )
        files = [dataclasses.replace(f, **{field: value}) if i == place else f for i, f in enumerate(catalog.files)]
        return dataclasses.replace(catalog, files=tuple(files))
    owner: Any = catalog.boxes if name in ("lengths", "offsets") else catalog
    column = getattr(owner, name).copy()
    column.reshape(-1)[draw.randrange(column.size)] = number % (2**31 if column.dtype == np.int32 else 2**62)
    if owner is catalog:
        return dataclasses.replace(catalog, **{name: column})
    return dataclasses.replace(catalog, boxes=dataclasses.replace(catalog.boxes, **{name: column}))


def mutate_groups(folder: Path, draw: random.Random) -> None:
    """As `mutate_catalog`, of a catalog in groups."""
    mutate_catalog(folder, draw, groups=True)


def mutate_header(folder: Path, draw: random.Random) -> None:
    """Change bytes of a storage file's header, whose sum in the catalog is right again."""
    catalog = decode((folder / CATALOG).read_bytes())
    place = draw.randrange(len(catalog.files))
    entry = catalog.files[place]
    data = bytearray((folder / entry.name).read_bytes())
    for _ in range(draw.randrange(1, 4)):
        at = draw.choice([draw.randrange(8), draw.randrange(len(data[: entry.data_offset]))])
        data[at] = draw.choice([0, 255, draw.randrange(256), *b'"[{0919,'])
    (folder / entry.name).write_bytes(data)
    total = xxhash.xxh3_64_intdigest(bytes(data[: entry.data_offset]))
    files = [dataclasses.replace(f, header_sum=total) if i == place else f for i, f in enumerate(catalog.files)]
    rewrite(folder, lambda _: encode(dataclasses.replace(catalog, files=tuple(files)), check=False))


def mutate_values(folder: Path, draw: random.Random) -> None:
    """Change bytes of encoded plain values, whose sums are right again."""
    catalog = decode((folder / CATALOG).read_bytes())
    place = draw.choice([i for i, f in enumerate(catalog.files) if "values" in f.name])
    entry = catalog.files[place]
    data = bytearray((folder / entry.name).read_bytes())
    for _ in range(draw.randrange(1, 3)):
        at = draw.randrange(entry.data_offset, len(data))
        data[at] = draw.choice([0, 255, 0x80, 0x90, 0xC0, 0xC1, 0xC7, 0xDB, 0xDF, draw.randrange(256), data[at] ^ 1])
    (folder / entry.name).write_bytes(data)
    sums = list(catalog.file_sums)
    sums[place] = block_sums(bytes(data[entry.data_offset :]), entry.block_bytes)
    rewrite(folder, lambda _: encode(dataclasses.replace(catalog, file_sums=tuple(sums)), check=False))


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace the catalog."""
    file = folder / CATALOG
    file.write_bytes(change(file.read_bytes()))


MUTATIONS = [
    mutate_footer,
    mutate_columns,
    mutate_bytes,
    mutate_sizes,
    mutate_catalog,
    mutate_groups,
    mutate_header,
    mutate_values,
]


# ---- what the processes run ----


def outcome(folder: Path, saved: dict[str, Any], *, plain: bool) -> str:
    """Open, load and verify a checkpoint; return what is wrong, "" if nothing is."""
    typed = (CorruptCheckpointError, IncompatibleCheckpointError)

    def read_all() -> None:
        with bytecheckpoint.open(folder) as checkpoint:
            for key in checkpoint:
                _ = checkpoint[key][...] if hasattr(checkpoint[key], "shape") else checkpoint[key]

    def load() -> None:
        destination = blank(saved)
        bytecheckpoint.load(folder, destination)
        assert right(destination, saved, plain=plain), "other values than were saved"

    for name, action in (("open", read_all), ("load", load), ("verify", lambda: verify(resolve(str(folder))))):
        try:
            action()
        except typed as error:
            damaged = isinstance(error, CorruptCheckpointError)
            if not (error.file if damaged else any(place in str(error) for place in _PLACES)):
                return f"{name}: {type(error).__name__} names no file and no tensor: {str(error)[:300]}"
        except BaseException as error:  # noqa: BLE001 (every other one is a finding)
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{name}: {type(error).__name__}: {str(error)[:300]} ({last.filename}:{last.lineno})"
    return ""


def run_batch(base: Path, work: Path, numbers: range, seed: int, saved: dict[str, Any], pipe: int) -> None:
    """Mutate, open, load and verify, once for each number, with limits; write a line for each."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + GIB, size + GIB))
    for number in numbers:
        draw = random.Random(seed * 1_000_003 + number)
        mutate = draw.choice(MUTATIONS)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        os.write(pipe, f"{mutate.__name__} {seed} {number}\n".encode())
        with contextlib.suppress(
            LookupError, OverflowError, TypeError, ValueError, AssertionError, MemoryError
        ):  # what no file can say
            mutate(work, draw)
        faulthandler.dump_traceback_later(SECONDS - 1)
        signal.alarm(SECONDS)
        wrong = outcome(work, saved, plain=mutate is not mutate_values)
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        os.write(pipe, f"={wrong}\n".replace("\n", " ").encode() + b"\n")


def main(folder: str, seed: str, count: str) -> None:
    base, work = Path(folder) / "base", Path(folder) / "work"
    saved = states()
    bytecheckpoint.save(base, saved)
    kinds: set[str] = set()
    wrong: list[str] = []
    outcomes = number = 0
    while number < int(count):
        read, write = os.pipe()
        batch = range(number, min(number + _BATCH, int(count)))
        if (child := os.fork()) == 0:
            os.close(read)
            run_batch(base, work, batch, int(seed), saved, write)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            told = lines.read().splitlines()
        _, status = os.waitpid(child, 0)
        begun = [line for line in told if not line.startswith("=")]
        ended = [line[1:].strip() for line in told if line.startswith("=")]
        kinds |= {line.split()[0] for line in begun}
        wrong += [f"{what}: {result}" for what, result in zip(begun, ended, strict=False) if result]
        if status:
            wrong.append(f"{begun[-1] if begun else batch}: ended with status {status}")
        number += max(len(begun), 1)
        outcomes = number
    print(json.dumps({"outcomes": outcomes, "kinds": sorted(kinds), "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
