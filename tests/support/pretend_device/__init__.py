"""A pretend accelerator, in C++: late work on streams, memory that the host cannot touch. `pretend_device.cpp` says how.

`load` makes it torch's accelerator for the rest of the process, so tests that use it run on the ranks of a world.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = [
    "HELD",
    "build",
    "compiler",
    "contexts",
    "delays",
    "device",
    "device_synchronizations",
    "load",
    "on_own_stream",
]

_SOURCE = Path(__file__).with_name("pretend_device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
_NAME = "pretend"
HELD = -1  # a delay that ends with its `delays`


def compiler() -> str | None:
    """Return the C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build() -> Path:
    """Return the built extension; compile it (20 seconds) unless an earlier run did, for the same torch."""
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__}{_FLAGS}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bytecheckpoint-tests"
    built = cache / f"pretend_device-{key}.so"
    if built.exists():
        return built
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    return built


def _compile(built: Path) -> None:
    root = Path(torch.__file__).parent
    new = built.with_suffix(f".{os.getpid()}")
    headers = [f"-isystem{root}/include", f"-isystem{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    found = compiler()
    assert found is not None, "no C++ compiler"
    command = [found, *_FLAGS, *headers, str(_SOURCE), "-o", str(new), *libraries]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    new.rename(built)


@functools.cache
def load() -> None:
    """Make the pretend device this process's accelerator: "pretend:0" and "pretend:1"."""
    torch.utils.rename_privateuse1_backend(_NAME)
    torch.ops.load_library(build())
    _library().pretend_register()
    module = types.ModuleType(f"torch.{_NAME}")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 2  # type: ignore[attr-defined]
    module.current_device = torch.accelerator.current_device_index  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch._register_device_module(_NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build()))


def device(index: int = 0) -> torch.device:
    return torch.device(_NAME, index)


@contextlib.contextmanager
def delays(*, kernel: int = 0, to_host: int = 0, to_device: int = 0) -> Iterator[None]:
    """Delay each task of some kinds, in milliseconds or `HELD`: work on a device, copies to and from the host."""
    _library().pretend_delays(kernel, to_host, to_device)
    try:
        yield
    finally:
        _library().pretend_delays(0, 0, 0)


def device_synchronizations() -> int:
    """Count the calls so far that waited for all streams of a device."""
    return int(_library().pretend_device_synchronizations())


@contextlib.contextmanager
def contexts() -> Iterator[set[int]]:
    """Collect the devices on which the body makes a context: any that becomes current or gets memory or a stream."""
    found: set[int] = set()
    _library().pretend_forget_contexts()
    yield found
    mask = int(_library().pretend_contexts())
    found.update(i for i in range(2) if mask >> i & 1)


@contextlib.contextmanager
def on_own_stream(index: int = 0) -> Iterator[torch.Stream]:
    """Run the body with a new stream as the current one, as a program that overlaps its work does."""
    stream = torch.Stream(device(index))
    with stream:
        yield stream
    stream.synchronize()
