"""`bare.c`: compiled on first use, called through ctypes, which lets go of the GIL."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
CORE = ROOT / "ext" / "core"
CORE_SOURCES = ("census.c", "domain.c", "error.c", "guard.c")
SOURCES = [Path(__file__).with_name("bare.c"), *(CORE / name for name in CORE_SOURCES)]
FLAGS = ["-std=gnu11", "-O3", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]

NODE = "127.0.0.1"
NAME_BYTES = 256

SIGNATURES = {
    "bare_new": (c_void_p, []),
    "bare_error": (c_char_p, [c_void_p]),
    "bare_open": (c_bool, [c_void_p, c_char_p, c_char_p, c_void_p, c_uint64, c_bool]),
    "bare_close": (None, [c_void_p]),
    "bare_name": (c_uint64, [c_void_p, POINTER(c_uint8)]),
    "bare_base": (c_uint64, [c_void_p]),
    "bare_key": (c_uint64, [c_void_p]),
    "bare_connect": (c_bool, [c_void_p, c_char_p, c_uint64, c_uint64]),
    "bare_write": (c_uint64, [c_void_p, POINTER(c_int32), c_uint64, c_uint64, c_uint64]),
    "bare_count": (c_uint64, [c_void_p, c_uint64]),
    "bump_layers": (None, [c_void_p, c_uint64, c_uint32, c_uint64, c_uint64, c_uint32, POINTER(c_uint64)]),
    "watch_layers": (c_bool, [c_void_p, c_uint64, c_uint32, POINTER(c_uint64)]),
    "spin_gaps": (c_uint64, [c_uint64, POINTER(c_uint64), c_uint32, POINTER(c_uint64)]),
}

Words = npt.NDArray[np.uint64]
Name = tuple[bytes, int, int]  # a side's address, and where and under which key its memory is


class BareError(Exception):
    """The bare loop could not be compiled or run."""


def command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BareError(f"{shlex.join(arguments)} failed (exit status {done.returncode}):\n{done.stderr}")
    return done.stdout


def compile_library() -> Path:
    """The shared library of these very sources, compilers and flags; made when it is not there yet."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    libfabric = shlex.split(command("pkg-config", "--cflags", "--libs", "libfabric"))
    build = [*compiler, *FLAGS, f"-I{CORE}", *map(str, SOURCES), *libfabric]
    contents = [path.read_bytes() for path in [*SOURCES, *sorted(CORE.glob("*.h"))]]
    digest = hashlib.sha256(b"\0".join([shlex.join(build).encode(), *contents])).hexdigest()[:16]
    library = ROOT / "build" / "benchmarks" / f"bare-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            command(*build, "-o", str(made))
            made.rename(library)
    return library


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(compile_library()))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def words(array: Words) -> ctypes._Pointer[c_uint64]:
    return array.ctypes.data_as(POINTER(c_uint64))


class Bare:
    """One side of the bare loop: a domain, an endpoint and one registration of `memory`.

    Raises:
        BareError: A call of libfabric failed, or 20 s passed; it names the call.
    """

    def __init__(self, provider: str, memory: npt.NDArray[np.uint8], *, is_target: bool) -> None:
        self._memory = memory
        self._side = library().bare_new()
        arguments = provider.encode(), NODE.encode(), memory.ctypes.data, memory.nbytes, is_target
        self._check(library().bare_open(self._side, *arguments))

    def _check(self, result: int) -> int:
        if not result:
            raise BareError(library().bare_error(self._side).decode())
        return result

    @property
    def name(self) -> Name:
        """What the other side connects to."""
        buffer = (c_uint8 * NAME_BYTES)()
        num_bytes = library().bare_name(self._side, buffer)
        return bytes(buffer[:num_bytes]), library().bare_base(self._side), library().bare_key(self._side)

    def connect(self, name: Name) -> None:
        self._check(library().bare_connect(self._side, *name))

    def write(self, pages: npt.NDArray[np.int32], page_bytes: int, window: int) -> int:
        """Write the pages, (source, destination) each, at most `window` at a time. Returns when it started, in ns."""
        pointer = pages.ctypes.data_as(POINTER(c_int32))
        return self._check(library().bare_write(self._side, pointer, len(pages), page_bytes, window))

    def count(self, num_immediates: int) -> int:
        """Count what lands. Returns when the last was seen, in ns."""
        return self._check(library().bare_count(self._side, num_immediates))

    def close(self) -> None:
        library().bare_close(self._side)


def bump_layers(counter_address: int, ticket: int, num_bumps: int, gap_ns: tuple[int, int], seed: int) -> Words:
    """Run the forward of `ticket` with a random gap before each bump. Returns the time of each bump in ns."""
    bumped_ns = np.zeros(num_bumps, dtype=np.uint64)
    least, most = gap_ns
    library().bump_layers(counter_address, ticket, num_bumps, least, most - least, seed, words(bumped_ns))
    return bumped_ns


def watch_layers(counter_address: int, ticket: int, num_bumps: int) -> Words:
    """Spin on the words of `ticket`. Returns the time each bump was seen in ns."""
    seen_ns = np.zeros(num_bumps, dtype=np.uint64)
    if not library().watch_layers(counter_address, ticket, num_bumps, words(seen_ns)):
        raise BareError(f"a bare watcher did not see {num_bumps} bumps of ticket {ticket} in 20 s")
    return seen_ns


def spin_gaps(for_ns: int, limits_ns: list[int]) -> tuple[list[int], int]:
    """Spin on the clock. Returns how many gaps were above each limit (rising), and the longest gap in ns."""
    limits = np.array(limits_ns, dtype=np.uint64)
    num_gaps = np.zeros_like(limits)
    longest_ns: int = library().spin_gaps(for_ns, words(limits), len(limits), words(num_gaps))
    return num_gaps.tolist(), longest_ns
