"""Memory that two processes map."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvmsgr.device.shared import import_memory
from kvmsgr.errors import LocalProtocolError, SharedMemoryError
from kvmsgr.workers import Exportable, SharedMemory

from .leftovers import nothing_left, num_files, num_mappings


@contextmanager
def memfd(num_bytes: int, seals: int) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def test_what_one_writes_the_other_reads() -> None:
    with nothing_left():
        ours = SharedMemory.allocate(10_000)
        theirs: Exportable = import_memory("host", ours.export(), ours.num_bytes)
        assert ours.address != theirs.address
        assert ours.address % mmap.PAGESIZE == 0
        assert not ours.buffer.any()
        ours.buffer[9_999] = 7
        assert ctypes.string_at(theirs.address + 9_999, 1) == b"\7"
        torch.frombuffer(ours.buffer, dtype=torch.int32)[0] = 5
        assert ctypes.string_at(theirs.address, 4) == b"\5\0\0\0"
        ours.close()
        del theirs


def test_memory_outlives_its_close_while_an_array_is_over_it() -> None:
    with nothing_left():
        memory, before = SharedMemory.allocate(4096), num_mappings()
        array = memory.buffer.view(np.int64)[::2]
        files = num_files()
        memory.close()
        memory.close()
        assert num_files() == files - 1
        array[:] = 3  # would end this process otherwise
        assert num_mappings() == before
        del array
        assert num_mappings() == before - 1


def test_memory_that_is_forgotten_is_given_back() -> None:
    with nothing_left():
        SharedMemory.allocate(4096)


def test_it_can_neither_shrink_nor_grow() -> None:
    with nothing_left():
        memory = SharedMemory.allocate(8192)
        for num_bytes in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.export(), num_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.export(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        memory.close()


def test_other_processes_that_are_started_do_not_get_it() -> None:
    memory = SharedMemory.allocate(4096)
    assert not os.get_inheritable(memory.export())
    memory.close()


@pytest.mark.parametrize("use", [lambda m: m.buffer, lambda m: m.address, lambda m: m.export()])
def test_closed_memory_is_not_used(use: Callable[[SharedMemory], object]) -> None:
    memory = SharedMemory.allocate(4096)
    memory.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        use(memory)


def test_only_the_allocator_exports() -> None:
    ours = SharedMemory.allocate(4096)
    theirs = SharedMemory.import_(ours.export(), 4096)
    with pytest.raises(LocalProtocolError, match="imported; its allocator exports it"):
        theirs.export()
    ours.close()


@pytest.mark.parametrize("num_bytes", [0, -1, 1 << 63, 1 << 62, 1 << 47])
def test_a_size_that_cannot_be_is_refused(num_bytes: int) -> None:
    with nothing_left(), pytest.raises(SharedMemoryError, match=str(num_bytes)):
        SharedMemory.allocate(num_bytes)


def test_device_memory_is_refused_by_name() -> None:
    with pytest.raises(SharedMemoryError, match=r"'cuda:0' was asked for; so far only host memory"):
        SharedMemory.allocate(4096, "cuda:0")
    with memfd(4096, fcntl.F_SEAL_SHRINK) as descriptor, pytest.raises(SharedMemoryError, match=r"'cuda'.*known: host"):
        import_memory("cuda", descriptor, 4096)


def test_what_cannot_be_mapped_safely_is_refused() -> None:
    with nothing_left():
        with memfd(8192, 0) as descriptor, pytest.raises(SharedMemoryError, match=r"may shrink.*SIGBUS"):
            SharedMemory.import_(descriptor, 8192)
        with memfd(8192, fcntl.F_SEAL_SHRINK) as descriptor:
            with pytest.raises(SharedMemoryError, match="has 8192 bytes, and 8193 were named"):
                SharedMemory.import_(descriptor, 8193)
            SharedMemory.import_(descriptor, 8192)
        read_only = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
        with (
            memfd(8192, read_only) as descriptor,
            pytest.raises(SharedMemoryError, match="cannot be mapped for writing"),
        ):
            SharedMemory.import_(descriptor, 8192)
        with open("/dev/zero", "r+b") as device, pytest.raises(SharedMemoryError, match="no memfd"):
            SharedMemory.import_(device.fileno(), 8192)
