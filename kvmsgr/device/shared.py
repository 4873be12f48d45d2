"""Memory that two processes map: a worker allocates it and computes in it, its lead registers it and moves it.

On the host it is a memfd. What crosses the Unix socket is a file descriptor, and will be for device memory, whose
exportable handles are file descriptors too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LocalProtocolError, SharedMemoryError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Exportable(Protocol):
    """Memory that another process can map, whatever device it lies on."""

    kind: ClassVar[str]
    """What the other process must know to map it."""

    @property
    def address(self) -> int:
        """Where it is mapped in this process."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def mapping(self) -> object:
        """What keeps it mapped: hold it for as long as addresses in this memory are used."""

    def export(self) -> int:
        """A file descriptor that stands for the memory, to be passed to the other process. It stays ours."""

    @classmethod
    def import_(cls, descriptor: int, num_bytes: int) -> Self:
        """Map the memory that a descriptor from another process stands for. The descriptor may be closed afterwards."""


class SharedMemory:
    """Host memory that another process can map.

    It stays mapped until it is closed *and* no array over it is left: closing pulls no memory away from under a tensor.
    A process that ends takes only its own mapping along.
    """

    kind: ClassVar[str] = "host"

    def __init__(self, mapped: mmap.mmap, descriptor: int | None) -> None:
        """Use `allocate` or `import_`."""
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapped, np.uint8)
        self._descriptor = descriptor
        self._close_descriptor = weakref.finalize(self, os.close, descriptor) if descriptor is not None else None

    @classmethod
    def allocate(cls, num_bytes: int, device: str = "cpu") -> Self:
        """Allocate zeroed memory, page-aligned. Physical memory is taken when it is first touched.

        Raises:
            SharedMemoryError: There is none of that size, or it is asked for on a device.
        """
        if device != "cpu":
            raise SharedMemoryError(
                f"memory on {device!r} was asked for; so far only host memory ('cpu') can be shared"
            )
        if not 0 < num_bytes < 1 << 63:
            raise SharedMemoryError(f"{num_bytes} bytes were asked for; it must be 1 to 2^63 - 1")
        try:
            descriptor = os.memfd_create("kvmsgr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharedMemoryError(f"the system gives no shared memory: {error}") from error
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(descriptor, num_bytes), descriptor)
        except OSError as error:
            os.close(descriptor)
            raise SharedMemoryError(f"the system gives no {num_bytes} bytes of shared memory: {error}") from error

    @classmethod
    def import_(cls, descriptor: int, num_bytes: int) -> Self:
        """Map what another process allocated.

        Raises:
            SharedMemoryError: The descriptor is no memfd, may shrink, is smaller than `num_bytes`, or is read-only.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise SharedMemoryError(f"a descriptor was handed over as memory and is no memfd: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise SharedMemoryError(
                "the memfd may shrink, and a SIGBUS would then end the process that maps it; seal it with "
                "F_SEAL_SHRINK, as SharedMemory.allocate does"
            )
        size_bytes = os.fstat(descriptor).st_size  # after the seal: it cannot get smaller any more
        if size_bytes < num_bytes:
            raise SharedMemoryError(f"the memfd has {size_bytes} bytes, and {num_bytes} were named")
        try:
            return cls(mmap.mmap(descriptor, num_bytes), None)
        except OSError as error:
            raise SharedMemoryError(f"a memfd of {num_bytes} bytes cannot be mapped for writing: {error}") from error

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """All bytes, writable; `torch.frombuffer` takes it.

        Raises:
            LocalProtocolError: The memory is closed.
        """
        if self._bytes is None:
            raise LocalProtocolError("the shared memory is closed")
        return self._bytes

    @property
    def mapping(self) -> object:
        """What keeps it mapped."""
        return self.buffer

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return int(self.buffer.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.buffer.nbytes

    def export(self) -> int:
        """The descriptor to pass to another process; it is closed with this object.

        Raises:
            LocalProtocolError: The memory is closed, or was imported: whoever allocated it hands it on.
        """
        if self._bytes is None or self._descriptor is None:
            raise LocalProtocolError(
                "this shared memory is " + ("closed" if self._bytes is None else "imported; its allocator exports it")
            )
        return self._descriptor

    def close(self) -> None:
        """Give it up. It is unmapped when no array over it is left; may be called again."""
        self._bytes = None
        if self._close_descriptor is not None:
            self._close_descriptor()


_KINDS: dict[str, type[Exportable]] = {SharedMemory.kind: SharedMemory}


def import_memory(kind: str, descriptor: int, num_bytes: int) -> Exportable:
    """Map memory of another process; `kind` is its `Exportable.kind`.

    Raises:
        SharedMemoryError: It cannot be mapped, or memory of that kind is not known here.
    """
    if kind not in _KINDS:
        raise SharedMemoryError(f"memory of kind {kind!r} cannot be mapped here; known: {', '.join(_KINDS)}")
    return _KINDS[kind].import_(descriptor, num_bytes)
