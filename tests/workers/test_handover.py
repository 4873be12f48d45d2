"""Arrays found again in another mapping of their memory."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr import Cache, CacheGroup, ContextBuffer, RawArray
from kvmsgr.device.cache import Rank
from kvmsgr.device.handover import build_rank, describe_rank
from kvmsgr.device.shared import SharedMemory
from kvmsgr.device.worker_messages import REQUESTS, Publish, SharedArray, SharedGroup
from kvmsgr.errors import LayoutError

from .leftovers import num_mappings

NUM_BYTES = (1 << 14, 1 << 12, 1 << 13)


class Both:
    """Memories as their worker maps them, and as the lead does."""

    def __init__(self) -> None:
        self.ours = [SharedMemory.allocate(num_bytes) for num_bytes in NUM_BYTES]
        self.theirs = [SharedMemory.import_(memory.export(), memory.num_bytes) for memory in self.ours]


BOTH = Both()  # once: hypothesis asks many times


def over_the_wire(message: Publish) -> Publish:
    decoded = REQUESTS.decode(msgspec.msgpack.encode(message))
    assert isinstance(decoded, Publish)
    return decoded


def group(*arrays: object, **more: object) -> CacheGroup:
    return CacheGroup.from_tensors([list(arrays)], "page token dim", **more)  # type: ignore[arg-type]  # as given


@st.composite
def arrays(draw: st.DrawFn) -> npt.NDArray[np.uint16]:
    """A view into one of the memories: some axes, transposed, with steps, some backwards."""
    memory = BOTH.ours[draw(st.integers(0, 2))].buffer
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    offset = 2 * draw(st.integers(0, 256))
    array = memory[offset:][: 2 * int(np.prod(shape))].view(np.uint16).reshape(shape)
    steps = tuple(slice(None, None, draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape)
    return array[steps].transpose(draw(st.permutations(range(len(shape)))))


def numbers_at(array: RawArray) -> npt.NDArray[np.uint16]:
    interface = {
        "version": 3,
        "data": (array.address, False),
        "shape": array.shape,
        "strides": array.strides_bytes,
        "typestr": "<u2",
    }
    return np.asarray(type("At", (), {"__array_interface__": interface})())


@given(st.lists(arrays(), min_size=1, max_size=3), st.lists(arrays(), max_size=2), st.integers(0, 999))
def test_every_element_is_found_again(
    cached: list[npt.NDArray[np.uint16]], buffers: list[npt.NDArray[np.uint16]], seed: int
) -> None:
    rank = Rank(
        Cache([group(array, name=f"group {index}") for index, array in enumerate(cached)]),
        [ContextBuffer(str(index), array) for index, array in enumerate(buffers)],
        ("10.0.0.1", None),
    )
    rebuilt = build_rank(over_the_wire(describe_rank(rank, BOTH.ours)), BOTH.theirs)
    for memory in BOTH.ours:
        memory.buffer[:] = np.random.default_rng(seed).integers(0, 256, memory.num_bytes, np.uint8)
    found = [*(one.parts[0][0] for one in rebuilt.cache.groups), *(buffer.array for buffer in rebuilt.context)]
    for array, there in zip([*cached, *buffers], found, strict=True):
        assert there.address != array.ctypes.data
        assert (there.dtype, there.item_bytes) == ("uint16", 2)
        np.testing.assert_array_equal(numbers_at(there), array)
    assert rebuilt.interfaces == ("10.0.0.1", None)


def test_what_a_group_says_of_itself_is_kept() -> None:
    memory = BOTH.ours[0]
    said = {"name": "state", "head_start": 3, "total_heads": 8, "layers": (4, 9), "recurrent": True}
    first, second = (memory.buffer[start:][:24].reshape(2, 3, 4) for start in (0, 64))
    rebuilt = build_rank(
        over_the_wire(describe_rank(Rank(Cache([group(first, second, **said)])), BOTH.ours)), BOTH.theirs
    )
    (there,) = rebuilt.cache.groups
    assert {name: getattr(there, name) for name in said} == said
    assert there.dims == "page token dim"
    assert [array.address - BOTH.theirs[0].address for array in there.parts[0]] == [0, 64]


def test_memory_stays_mapped_as_long_as_one_of_its_groups_is_used() -> None:
    ours = SharedMemory.allocate(4096)
    before = num_mappings()
    rank = Rank(Cache([group(ours.buffer[:8].reshape(1, 2, 4))]), [ContextBuffer("hidden", ours.buffer[8:])])
    rebuilt = build_rank(describe_rank(rank, [ours]), [SharedMemory.import_(ours.export(), 4096)])
    first = rebuilt.cache.groups[0]
    del rebuilt
    assert num_mappings() == before + 1
    del first
    assert num_mappings() == before
    ours.close()


def raw(offset_bytes: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...]) -> RawArray:
    return RawArray(BOTH.ours[0].address + offset_bytes, shape, strides_bytes, "uint8", 1)


@pytest.mark.parametrize(
    "array",
    [
        raw(-1, (2,), (1,)),
        raw(0, (NUM_BYTES[0] + 1,), (1,)),
        raw(NUM_BYTES[0] - 4, (2, 3), (4, 1)),
        raw(3, (5,), (-1,)),
        np.zeros(8, np.uint8),
    ],
)
def test_an_array_outside_of_the_memories_is_named(array: object) -> None:
    for rank, name in (
        (Rank(Cache([group(raw(0, (1,), (1,)), array)])), "group 'kv', part 0, array 1"),
        (Rank(Cache([]), [ContextBuffer("hidden", array)]), "context buffer 'hidden'"),
    ):
        with pytest.raises(LayoutError, match=f"{name} reaches from 0x.*outside of the memories.*SharedMemory"):
            describe_rank(rank, BOTH.ours[:1])


@pytest.mark.parametrize("array", [raw(0, (2, 2), (1,)), raw(0, (2, 0), (1, 1)), raw(0, (), ())])
def test_an_array_without_shape_is_named(array: RawArray) -> None:
    with pytest.raises(LayoutError, match="group 'kv', part 0, array 0 has shape"):
        describe_rank(Rank(Cache([group(array)])), BOTH.ours)


sizes = st.integers(1, 5) | st.integers(1, (1 << 63) - 1)
strides = st.integers(-9, 4096) | st.integers(-(1 << 63), (1 << 63) - 1)


@given(
    st.builds(
        SharedArray,
        st.integers(0, 3),
        st.integers(0, NUM_BYTES[0] + 1) | st.integers(0, (1 << 63) - 1),
        st.lists(sizes, max_size=4).map(tuple),
        st.lists(strides, max_size=4).map(tuple),
        st.just("uint8"),
        sizes,
    )
)
def test_no_array_that_is_claimed_reaches_out_of_its_memory(array: SharedArray) -> None:
    message = Publish((), (SharedGroup("kv", ((array,),), "dim", 0, None, None, False),), (), (None,))
    try:
        rebuilt = build_rank(over_the_wire(message), BOTH.theirs).cache.groups[0].parts[0][0]
    except LayoutError as error:
        assert "group 'kv', part 0, array 0" in str(error)  # noqa: PT017  the others below must hold
        return
    memory = BOTH.theirs[array.memory]
    corners = [rebuilt.address]
    for size, stride in zip(rebuilt.shape, rebuilt.strides_bytes, strict=True):
        corners += [corner + (size - 1) * stride for corner in corners]
    assert memory.address <= min(corners)
    assert max(corners) + rebuilt.item_bytes <= memory.address + memory.num_bytes
    assert int(np.prod(rebuilt.shape, dtype=object)) <= memory.num_bytes  # nothing that loops over it runs for ever


CLAIMS: dict[str, tuple[SharedArray, str]] = {
    "no such memory": (SharedArray(3, 0, (1,), (1,), "uint8", 1), "lies in memory 3; 3 were handed over"),
    "backwards": (SharedArray(0, 2, (4,), (-1,), "uint8", 1), "from byte -1 to 3 of memory 0"),
    "the last byte": (SharedArray(1, 4095, (2,), (1,), "uint8", 1), "to 4097 of memory 1, which has 4096"),
    "the last item": (SharedArray(1, 4094, (1,), (1,), "float32", 4), "to 4098 of memory 1, which has 4096"),
    "no stride": (SharedArray(0, 0, (1 << 40,), (0,), "uint8", 1), "has shape"),
    "a stride too few": (SharedArray(0, 0, (1, 1), (0,), "uint8", 1), "as many as axes are needed"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_refused_by_name(claim: str) -> None:
    array, why = CLAIMS[claim]
    message = Publish((), (SharedGroup("kv", ((array,),), "dim", 0, None, None, False),), (), (None,))
    with pytest.raises(LayoutError, match=why):
        build_rank(over_the_wire(message), BOTH.theirs)


@pytest.mark.parametrize(
    "make", [lambda: SharedArray(0, 0, (0,), (1,), "", 1), lambda: SharedArray(-1, 0, (), (), "", 1)]
)
def test_numbers_out_of_bounds_are_no_message(make: Callable[[], SharedArray]) -> None:
    message = Publish((), (SharedGroup("kv", ((make(),),), "dim", 0, None, None, False),), (), (None,))
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(message)
