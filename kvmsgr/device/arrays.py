"""From whatever holds a cache to an address, a shape and strides."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvmsgr.errors import LayoutError
from kvmsgr.types import RawArray


@runtime_checkable
class _Tensor(Protocol):
    """What is read of a torch tensor; torch itself is not imported."""

    shape: Any
    dtype: Any
    device: Any

    def data_ptr(self) -> int: ...
    def stride(self) -> Any: ...
    def element_size(self) -> int: ...


ArrayLike = Any
"""A torch tensor, a `RawArray`, or anything with `__dlpack__`."""


def raw_array(array: ArrayLike) -> RawArray:
    """Read address, shape and strides; nothing is copied.

    Raises:
        LayoutError: The object is none of the kinds above, or lies in memory that is not supported here.
    """
    if isinstance(array, RawArray):
        if not 0 < array.address < 1 << 64:
            raise LayoutError(f"an array lies at address {array.address}; there is no memory there")
        return array
    if isinstance(array, _Tensor):
        if str(array.device.type) != "cpu":
            raise LayoutError(f"a tensor lies on device {array.device}; only host memory can be registered so far")
        item = array.element_size()
        return RawArray(
            address=array.data_ptr(),
            shape=tuple(int(n) for n in array.shape),
            strides_bytes=tuple(int(n) * item for n in array.stride()),
            dtype=str(array.dtype).removeprefix("torch."),
            item_bytes=item,
        )
    if hasattr(array, "__dlpack__"):
        try:
            view = np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise LayoutError(f"DLPack refused {type(array).__name__}: {error}; pass a kvmsgr.RawArray") from error
        if not view.flags.writeable:
            raise LayoutError(f"the memory of {type(array).__name__} is read-only; a cache must be writable")
        return RawArray(
            address=int(view.__array_interface__["data"][0]),
            shape=view.shape,
            strides_bytes=view.strides,
            dtype=view.dtype.name,
            item_bytes=view.dtype.itemsize,
        )
    raise LayoutError(
        f"cannot read {type(array).__name__} as an array: pass a torch tensor, an object with __dlpack__, "
        "or a kvmsgr.RawArray"
    )
