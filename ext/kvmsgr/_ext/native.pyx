# cython: language_level=3, boundscheck=False, wraparound=False, auto_pickle=False, autotestdict=False
"""Owners of the C core: they check arguments, keep memory alive, and turn errors into exceptions.

No thread of the core ever takes the GIL; it speaks through records and one eventfd (`Poller.take`, `Poller.fd`).
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from kvmsgr._ext.core cimport *

import atexit
import os
import sys
import weakref
from collections import namedtuple
from errno import ETIMEDOUT as _ETIMEDOUT

REACHED = KV_REACHED
OVERFLOW = KV_OVERFLOW
STRAY = KV_STRAY
SENT = KV_SENT
STOPPED = KV_STOPPED
LINK_OPENED = KV_LINK_OPENED
LINK_FAILED = KV_LINK_FAILED
LINK_CLOSED = KV_LINK_CLOSED
STEP_ENDED = KV_STEP_ENDED
STEP_FAULT = KV_STEP_FAULT
SLOT_REACHED = KV_SLOT_REACHED
LINK_HELD = KV_LINK_HELD
PORT_OPENED = KV_PORT_OPENED
PORT_FAILED = KV_PORT_FAILED
PORT_CLOSED = KV_PORT_CLOSED
JOIN_LOST = KV_JOIN_LOST

LANDED_COUNTED = KV_LANDED_COUNTED
LANDED_REACHED = KV_LANDED_REACHED
LANDED_OVERFLOW = KV_LANDED_OVERFLOW
LANDED_STRAY_SEEN = KV_LANDED_STRAY_SEEN
LANDED_STRAY = KV_LANDED_STRAY
LANDED_BEAT = KV_LANDED_BEAT

FEWER = KV_FEWER
MORE = KV_MORE
DEADLINE = KV_DEADLINE

FAILED_OPEN = KV_FAILED_OPEN
FAILED_REGISTER = KV_FAILED_REGISTER
FAILED_CONNECT = KV_FAILED_CONNECT
FAILED_POST = KV_FAILED_POST
FAILED_COMPLETION = KV_FAILED_COMPLETION
FAILED_TIMEOUT = KV_FAILED_TIMEOUT
FAILED_CLOSE = KV_FAILED_CLOSE
FAILED_LEASE = KV_FAILED_LEASE
FAILED_STUCK = KV_FAILED_STUCK

_FAULTS = {"drop": KV_FAULT_DROP, "flip": KV_FAULT_FLIP, "fail": KV_FAULT_FAIL, "reorder": KV_FAULT_REORDER}

ATTEMPT_STATES = ("free", "counting", "done", "overflow", "ended")
LABEL_BYTES = KV_LABEL_BYTES
NUM_LEGS = KV_NUM_LEGS
MAX_GROUPS = KV_MAX_GROUPS

Info = namedtuple("Info", "pid pid_started incarnation name address provider software libfabric started_ns")
GroupPages = namedtuple("GroupPages", "group name held total")
Leg = namedtuple("Leg", "number role state request_id peer attempt slot generation rows_expected num_layers pages_held "
                 "started_ns since_ns reason why rows_posted writes_posted signals_seen entries_posted num_entries "
                 "slot_rows attempt_rows attempt_expected torn")
_ROLES = {"fetch": KV_FETCH, "serve": KV_SERVE}

cdef uint64_t _LONGEST_NS = <uint64_t>INT64_MAX


class NativeError(Exception):
    """A libfabric call failed: `call` is its name, `errno` its positive code, `provider` who was asked."""

    def __init__(self, message, call, errno, provider):
        super().__init__(message)
        self.call = call
        self.errno = errno
        self.provider = provider


class RingFullError(Exception):
    """There is no room now: for the step in its layer counter's ring, or for a command. Nothing was armed."""


_open_pollers = weakref.WeakSet()


@atexit.register
def _close_pollers():
    """A thread must not go on while the interpreter and libfabric are taken down around it."""
    for poller in list(_open_pollers):
        try:
            poller.close()
        except NativeError as error:
            print(f"kvmsgr: {error}", file=sys.stderr)


_kept_for_good = []   # what a thread that is stuck inside libfabric may still use


cdef object _error(kv_error *e, str provider=""):
    """The exception that `e` stands for."""
    text = e.text.decode("utf-8", "replace")
    if e.kind == KV_NATIVE:
        return NativeError(text, e.call.decode(), e.code, provider)
    if e.kind == KV_SYSTEM:
        return OSError(e.code, f"{text}: {os.strerror(e.code)}")
    if e.kind == KV_FULL:
        return RingFullError(text)
    if e.kind == KV_CLOSED:
        return RuntimeError(text)
    if e.kind == KV_MISSING:
        return KeyError(text)
    if e.kind == KV_NO_MEMORY:
        return MemoryError(text)
    return ValueError(text)


def libfabric_version():
    """(major, minor) of the libfabric that is loaded."""
    cdef uint32_t version = fi_version()
    return FI_MAJOR(version), FI_MINOR(version)


def error_text(int code):
    """What libfabric calls an error; its codes are errno's and some more."""
    return fi_strerror(code).decode()


def providers():
    """Names of the RDM providers that take our hints, as libfabric ranks them."""
    cdef char names[64][64]
    cdef size_t num = 0
    cdef kv_error e
    cdef c_bool ok
    with nogil:
        ok = kv_providers(names, 64, &num, &e)
    if not ok:
        raise _error(&e)
    return [names[i].decode() for i in range(num)]


def debug_counters():
    """Live native objects by kind."""
    return {kv_census_names[i].decode(): kv_census_read(<kv_object>i) for i in range(KV_NUM_OBJECTS)}


def monotonic_ns():
    """The clock that stamps records."""
    return kv_now_ns()


cdef int _put(char *room, Py_ssize_t room_bytes, str text) except -1:
    """Fills `room` with as many characters of `text` as it has bytes for, and zeros behind them."""
    cdef bytes raw = text.encode("utf-8", "replace")
    if len(raw) > room_bytes:
        raw = raw[:room_bytes].decode("utf-8", "ignore").encode()
    memset(room, 0, room_bytes)
    memcpy(room, <const char *>raw, len(raw))
    return 0


cdef str _get(const char *room, size_t room_bytes):
    return room[:strnlen(room, room_bytes)].decode("utf-8", "replace")


cdef class StateFile:
    """Slots, attempts and legs of one messenger, in one mapped file that another process may look into.

    Args:
        path: File to create (0600, must not exist), or to look into. None: anonymous memory.
        incarnation: Of the messenger, at most 32 hex digits, or their value; ignored when looking.
        writable: False maps an existing file to look into it.
    """

    cdef kv_state *state
    cdef readonly object path
    cdef readonly bint writable

    def __cinit__(self, path, *, incarnation=0, bint writable=True):
        cdef kv_error e
        cdef bytes digits = f"{int(incarnation, 16) if isinstance(incarnation, str) else incarnation:032x}".encode()
        cdef bytes raw = b"" if path is None else os.fsencode(path)
        cdef char *name = raw
        self.path = None if path is None else os.fspath(path)
        self.writable = writable
        if writable:
            if len(digits) > 32:
                raise ValueError(f"incarnation {incarnation!r} has more than 32 hex digits")
            self.state = kv_state_create(NULL if path is None else name, digits, &e)
        elif path is None:
            raise ValueError("looking into a state file needs its path")
        else:
            self.state = kv_state_look(name, &e)
        if self.state == NULL:
            raise _error(&e)

    def __dealloc__(self):
        cdef kv_error e
        if self.state != NULL:
            kv_state_close(self.state, &e)

    def close(self):
        """Unmaps, and removes the file if this process created it. Its pollers are closed before. Idempotent."""
        cdef kv_error e
        if self.state == NULL:
            return
        if not kv_state_close(self.state, &e):
            raise _error(&e)
        self.state = NULL

    cdef int _check(self, bint writing) except -1:
        if self.state == NULL:
            raise RuntimeError("the state file is closed")
        if writing and not self.writable:
            raise RuntimeError("the state file is another process's: it can only be looked into")
        return 0

    cdef uint32_t _slot_index(self, uint32_t slot, uint32_t generation) except? 0xffffffff:
        if slot >> KV_SLOT_BITS or generation >> KV_GENERATION_BITS:
            raise ValueError(f"slot {slot}, generation {generation}: want < {1 << KV_SLOT_BITS} and "
                             f"< {1 << KV_GENERATION_BITS}")
        return slot << KV_GENERATION_BITS | generation

    @property
    def pid(self):
        """Of the process that created the file."""
        self._check(False)
        return self.state.header.pid

    @property
    def incarnation(self):
        """32 hex digits."""
        self._check(False)
        return self.state.header.incarnation.decode()

    @property
    def poller_seen_ns(self):
        """When a poller last looked at the clock, which it does many times a second; 0: none has."""
        self._check(False)
        return kv_state_poller_seen_ns(self.state)

    @property
    def quarantined(self):
        """Pages that a lost peer may still write into, as `set_quarantined` said last."""
        self._check(False)
        return kv_state_quarantined(self.state)

    @property
    def expecting(self):
        """Attempts that are still counting: while it is not 0, pollers do not sleep."""
        self._check(False)
        return kv_state_expecting(self.state)

    def open_attempt(self, uint64_t attempt, uint64_t expected_rows, str label):
        """Begins to count for `attempt`, from 0. One that expects no rows is done at once, without a record.

        Raises:
            ValueError: the attempt 2^14 numbers earlier, which had this entry of the table, is still counting.
        """
        cdef kv_error e
        self._check(True)
        cdef bytes raw = label.encode()[:KV_LABEL_BYTES]
        if attempt >= <uint64_t>INT64_MAX:
            raise ValueError(f"attempt {attempt} is above 2^63 - 2")
        if not kv_state_open_attempt(self.state, attempt, expected_rows, raw, len(raw), &e):
            raise _error(&e)

    def end_attempt(self, uint64_t attempt):
        """It is no longer expected; its rows are still counted. Idempotent."""
        cdef kv_error e
        self._check(True)
        if not kv_state_end_attempt(self.state, attempt, &e):
            raise _error(&e)

    def link_slot(self, uint32_t slot, uint32_t generation, uint64_t attempt):
        """From now on rows that land in (slot, generation) count for `attempt` too; the slot starts from 0."""
        cdef kv_error e
        self._check(True)
        if not kv_state_link_slot(self.state, self._slot_index(slot, generation), attempt, &e):
            raise _error(&e)

    def unlink_slot(self, uint32_t slot, uint32_t generation):
        """Rows that land in it from now on are strays."""
        self._check(True)
        kv_state_unlink_slot(self.state, self._slot_index(slot, generation))

    def land(self, uint32_t immediate):
        """Counts one landed write. This and the next three are for pollers that are not native.

        Returns:
            (LANDED_*, attempt, its rows after this write, rows of its slot if these are the awaited ones, else 0). Of a
            heartbeat the second is its link. The middle two are 0 where the slot counts for no attempt.
        """
        cdef kv_landing landing = kv_landing(0, 0, False, 0, 0)
        self._check(True)
        cdef kv_landed landed = kv_state_land(self.state, immediate, &landing)
        return <int>landed, landing.attempt, landing.rows, landing.slot_rows if landing.slot_reached else 0

    def leg_posted(self, uint32_t tag, uint32_t rows, uint32_t entries, uint32_t num_entries):
        """A write of the leg is posted, and with it so many entries of its transfer."""
        self._check(True)
        kv_leg_posted(self.state, tag, rows, entries, num_entries)

    def leg_rows_posted(self, uint32_t number):
        """Rows of a leg that were posted; 0 when no such leg is open."""
        self._check(False)
        return kv_leg_rows_posted(self.state, number)

    def leg_signalled(self, uint32_t tag, uint32_t bumps):
        """A step of the leg shows so many bumps."""
        self._check(True)
        kv_leg_signalled(self.state, tag, bumps)

    def poller_seen(self, uint64_t now_ns):
        """A poller has gone round."""
        self._check(True)
        kv_state_seen(self.state, now_ns)

    def link_beat(self, uint32_t slot, uint32_t generation, uint32_t link):
        """Rows that land in (slot, generation) are heartbeats of `link`, until `unlink_slot`."""
        self._check(True)
        kv_state_link_beat(self.state, self._slot_index(slot, generation), link)

    def await_slot(self, uint32_t slot, uint32_t generation, uint64_t rows):
        """Watches a linked slot for `rows`; returns its rows as they stand after that.

        Fewer: one SLOT_REACHED record (id slot << 4 | generation) comes when there are exactly `rows`. Equal: all are
        there, and a record may come too. More: no record comes. Linking or unlinking the slot ends the watch.
        """
        self._check(True)
        return kv_state_await_slot(self.state, self._slot_index(slot, generation), rows)

    def open_leg(self, uint32_t number, *, str role, str state, str request_id, str peer, uint64_t attempt,
                 uint32_t slot, uint32_t generation, uint64_t rows_expected, uint32_t num_layers):
        """Shows a leg to whoever looks. Transfers with `number` as their tag count for it. Texts are cut to their room.

        Args:
            role: "fetch" or "serve".
            attempt, slot, generation, rows_expected: Of the side that fetches, on both sides.

        Raises:
            ValueError: the leg 2^14 numbers earlier or later, which has this entry of the table, is still open.
        """
        cdef kv_error e
        cdef kv_leg_info info
        self._check(True)
        if role not in _ROLES or number == <uint32_t>-1:
            raise ValueError(f"leg {number}, role {role!r}: want fetch or serve, and a number below 2^32 - 1")
        memset(&info, 0, sizeof(info))
        info.role, info.num_layers = _ROLES[role], num_layers
        info.attempt, info.rows_expected = attempt, rows_expected
        info.slot_index = self._slot_index(slot, generation)
        _put(info.state, sizeof(info.state), state)
        _put(info.request_id, sizeof(info.request_id), request_id)
        _put(info.peer, sizeof(info.peer), peer)
        if not kv_state_open_leg(self.state, number, &info, &e):
            raise _error(&e)

    def update_leg(self, uint32_t number, *, str state, str reason="", str why="", uint32_t pages_held=0):
        """How a leg stands now. KeyError: it is not open."""
        cdef kv_error e
        cdef kv_leg_info info
        self._check(True)
        memset(&info, 0, sizeof(info))
        info.pages_held = pages_held
        _put(info.state, sizeof(info.state), state)
        _put(info.reason, sizeof(info.reason), reason)
        _put(info.why, sizeof(info.why), why)
        if not kv_state_update_leg(self.state, number, &info, &e):
            raise _error(&e)

    def close_leg(self, uint32_t number):
        """Nothing of it is left. Idempotent."""
        self._check(True)
        kv_state_close_leg(self.state, number)

    cdef object _leg(self, kv_leg_view *view):
        cdef kv_leg_info *info = &view.info
        cdef uint32_t slot_index = info.slot_index & ((1 << (KV_SLOT_BITS + KV_GENERATION_BITS)) - 1)
        cdef kv_attempt_view attempt
        slot_rows = attempt_rows = attempt_expected = None
        if info.role == KV_FETCH:   # a serving leg's slot and attempt are its peer's: our tables know nothing of them
            slot_rows = kv_state_slot_rows(self.state, slot_index)
            if kv_state_view(self.state, info.attempt % KV_NUM_ATTEMPTS, &attempt) and attempt.id == info.attempt:
                attempt_rows, attempt_expected = attempt.rows, attempt.expected
        return Leg(
            view.number, "fetch" if info.role == KV_FETCH else "serve", _get(info.state, sizeof(info.state)),
            _get(info.request_id, sizeof(info.request_id)), _get(info.peer, sizeof(info.peer)), info.attempt,
            slot_index >> KV_GENERATION_BITS, slot_index & ((1 << KV_GENERATION_BITS) - 1), info.rows_expected,
            info.num_layers, info.pages_held, info.started_ns, info.since_ns,
            _get(info.reason, sizeof(info.reason)), _get(info.why, sizeof(info.why)), view.rows_posted,
            view.writes_posted, view.signals_seen, view.entries_posted, view.num_entries, slot_rows, attempt_rows,
            attempt_expected, view.torn)

    def legs(self):
        """Every open leg, by its entry of the table.

        What the owner wrote of one leg belongs together, unless `torn`: then the owner was stopped while it wrote. The
        counters move beside it. `slot_rows` and `attempt_rows` are None of a serving leg: its peer knows them.
        """
        cdef kv_leg_view view
        cdef uint32_t entry = 0
        self._check(False)
        found = []
        while kv_state_next_leg(self.state, &entry, &view):
            found.append(self._leg(&view))
        return found

    def set_info(self, *, str name, str address, str provider, str software):
        """Who the messenger is: its name, control address, libfabric provider, and the software around it."""
        cdef kv_state_info info
        self._check(True)
        _put(info.name, sizeof(info.name), name)
        _put(info.address, sizeof(info.address), address)
        _put(info.provider, sizeof(info.provider), provider)
        _put(info.software, sizeof(info.software), software)
        kv_state_set_info(self.state, &info)

    def info(self):
        """Who made the file. `pid_started`: clock ticks since boot, as in /proc/<pid>/stat; 0 where it is unknown."""
        cdef kv_state_info info
        self._check(False)
        kv_state_read_info(self.state, &info)
        header = self.state.header
        version = header.libfabric_version
        return Info(
            header.pid, header.pid_started, self.incarnation, _get(info.name, sizeof(info.name)),
            _get(info.address, sizeof(info.address)), _get(info.provider, sizeof(info.provider)),
            _get(info.software, sizeof(info.software)), (FI_MAJOR(version), FI_MINOR(version)), header.started_ns)

    def set_pages(self, uint32_t group, str name, uint64_t held, uint64_t total):
        """Pages of a cache group, and how many of them requests hold. A group without any is not shown."""
        cdef char room[24]
        self._check(True)
        if group >= KV_MAX_GROUPS:
            raise ValueError(f"group {group}: a state file has room for {KV_MAX_GROUPS}")
        _put(room, sizeof(room), name)
        kv_state_set_pages(self.state, group, room, held, total)

    def pages(self):
        """The cache groups that have pages."""
        cdef kv_pages_view view
        self._check(False)
        found = []
        for group in range(KV_MAX_GROUPS):
            view = kv_state_pages(self.state, group)
            if view.total:
                found.append(GroupPages(group, _get(view.name, sizeof(view.name)), view.held, view.total))
        return found

    def set_quarantined(self, uint64_t num_pages):
        """Pages that a lost peer may still write into."""
        self._check(True)
        kv_state_quarantine(self.state, num_pages)

    def attempt_rows(self, uint64_t attempt):
        """Rows that have landed for it. KeyError: it was never opened, or its entry is another's now."""
        self._check(False)
        if not kv_attempt_known(self.state, attempt):
            raise KeyError(f"attempt {attempt} is not in the table")
        return kv_state_attempt_rows(self.state, attempt)

    def slot_rows(self, uint32_t slot, uint32_t generation):
        """Rows that have landed in it since it was linked last."""
        self._check(False)
        return kv_state_slot_rows(self.state, self._slot_index(slot, generation))

    def attempts(self):
        """(attempt, state, rows, expected, label) of every entry that is not free; `state` indexes ATTEMPT_STATES."""
        cdef kv_attempt_view view
        self._check(False)
        found = []
        for entry in range(KV_NUM_ATTEMPTS):
            if kv_state_view(self.state, entry, &view):
                found.append((view.id, view.state, view.rows, view.expected, view.label.decode("utf-8", "replace")))
        return found

    def find(self, str label):
        """The newest attempt with this label, or None."""
        cdef kv_attempt_view view
        cdef uint64_t newest_ns = 0
        self._check(False)
        raw = label.encode()[:KV_LABEL_BYTES]
        found = None
        for entry in range(KV_NUM_ATTEMPTS):
            if kv_state_view(self.state, entry, &view) and view.label == raw and view.started_ns >= newest_ns:
                found, newest_ns = view.id, view.started_ns
        return found


_ATTACHED = object()   # in place of a counter's memory: it comes next


@cython.no_gc  # it is in no cycle, and the collector must not clear a buffer that is lent to it
cdef class LayerCounter:
    """The layer counter of one engine stream, in host memory.

    `start` and `bump` are called by the stream's one thread; they take no lock and never wait.

    Args:
        num_slots: Steps that may be outstanding at a time.
        memory: A writable buffer that the counter is made in, at a multiple of 64 bytes, with room for `size_bytes`:
            memory that another process has mapped as well, and `attach`es to. It is cleared first, and kept as long as
            the counter.
    """

    cdef kv_layer_counter *counter
    cdef kv_turns *turns        # once it is watched
    cdef StateFile watched_by   # by pollers that count into this
    cdef uint64_t watchers      # their places among those of their messenger
    cdef Py_buffer view
    cdef bint lent
    cdef readonly uint32_t num_slots   # as they were: other processes may write to the counter's memory

    def __cinit__(self, num_slots=64, memory=None):
        if not 1 <= num_slots <= KV_MAX_SLOTS:
            raise ValueError(f"num_slots {num_slots}: want 1 to {KV_MAX_SLOTS}")
        if memory is _ATTACHED:
            return
        self.num_slots = num_slots
        if memory is None:
            self.counter = kv_layer_counter_new(num_slots)
            if self.counter == NULL:
                raise MemoryError
        else:
            self._borrow(memory, kv_layer_counter_bytes(num_slots))
            self.counter = kv_layer_counter_init(self.view.buf, num_slots)

    def __dealloc__(self):
        if self.turns != NULL:
            kv_turns_drop(self.turns)
        if self.lent:
            PyBuffer_Release(&self.view)
        elif self.counter != NULL:
            kv_layer_counter_free(self.counter)

    cdef _watch(self, StateFile state, uint32_t index):
        """One of the pollers that count into `state` is going to."""
        if self.watched_by is not None and (self.watched_by is not state or self.watchers >> index & 1):
            raise ValueError("this layer counter is or was watched: its ring still shows old tickets")
        if self.turns == NULL:
            self.turns = kv_turns_new(self.num_slots)
            if self.turns == NULL:
                raise MemoryError

    cdef _borrow(self, memory, size_t least_bytes):
        PyObject_GetBuffer(memory, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.lent = True
        if <size_t>self.view.len < least_bytes or <uintptr_t>self.view.buf % 64:
            raise ValueError(f"{self.view.len} bytes of memory at {<uintptr_t>self.view.buf:#x}: want at least "
                             f"{least_bytes} at a multiple of 64")

    @staticmethod
    def size_bytes(num_slots=64):
        """Of the memory that a counter needs."""
        if not 1 <= num_slots <= KV_MAX_SLOTS:
            raise ValueError(f"num_slots {num_slots}: want 1 to {KV_MAX_SLOTS}")
        return kv_layer_counter_bytes(num_slots)

    @classmethod
    def attach(cls, memory):
        """The counter that was made in `memory`, as another process has mapped it.

        Raises:
            ValueError: there is none, or the memory is shorter than it.
        """
        cdef LayerCounter self = cls(memory=_ATTACHED)
        self._borrow(memory, kv_layer_counter_bytes(1))
        cdef uint32_t num_slots = (<kv_layer_counter *>self.view.buf).num_slots
        if not 1 <= num_slots <= KV_MAX_SLOTS or <size_t>self.view.len < kv_layer_counter_bytes(num_slots):
            raise ValueError(f"no layer counter in these {self.view.len} bytes: it would have {num_slots} slots")
        self.counter, self.num_slots = <kv_layer_counter *>self.view.buf, num_slots
        return self

    def start(self, uint64_t ticket):
        """Right before the forward of `ticket`; 0 for a forward that no step was begun for, which publishes nothing."""
        if ticket > KV_MAX_TICKET:
            raise ValueError(f"ticket {ticket} is above 2^40 - 1")
        kv_counter_start(self.counter, self.num_slots, ticket)

    def bump(self):
        """After each layer, and once more after the context."""
        kv_counter_bump(self.counter, self.num_slots)

    def bumps_of(self, uint64_t ticket):
        """Bumps of `ticket` as its ring slot shows them; None: it has not started, or its slot shows another one."""
        cdef uint64_t word = kv_counter_read(self.counter, self.num_slots, ticket)
        return kv_word_bumps(word) if word else None

    @property
    def ticket(self):
        """Of the current word."""
        return kv_word_ticket(kv_counter_current(self.counter))

    @property
    def bumps(self):
        """Of the current word."""
        return kv_word_bumps(kv_counter_current(self.counter))

    @property
    def address(self):
        """Of the C struct (`ext/core/layer_counter.h`), for engines whose forward runs in native code."""
        return <uintptr_t>self.counter


cdef class _Keys:
    """Lists of keys as the core takes them, one a network interface."""

    cdef kv_keys *lists
    cdef uint32_t num

    def __cinit__(self, list keys):
        self.lists = <kv_keys *>calloc(len(keys) + 1, sizeof(kv_keys))
        if self.lists == NULL:
            raise MemoryError
        for i, its_keys in enumerate(keys):
            self.lists[i].keys = <uint64_t *>calloc(len(its_keys) + 1, sizeof(uint64_t))
            if self.lists[i].keys == NULL:
                raise MemoryError
            self.num += 1
            for key in its_keys:
                self.lists[i].keys[self.lists[i].num] = key
                self.lists[i].num += 1

    def __dealloc__(self):
        for i in range(self.num):
            free(self.lists[i].keys)
        free(self.lists)


cdef class _Remote:
    """A peer's endpoints as the core takes them. Keeps what they point into."""

    cdef kv_remote remote
    cdef kv_remote_name *names
    cdef kv_remote_region *regions
    cdef kv_remote_cell *cells
    cdef list targets

    def __cinit__(self, targets, regions, beats):
        cdef bytes address
        self.targets = list(targets)
        self.names = <kv_remote_name *>calloc(len(self.targets) + 1, sizeof(kv_remote_name))
        self.regions = <kv_remote_region *>calloc(len(regions) + 1, sizeof(kv_remote_region))
        self.cells = <kv_remote_cell *>calloc(len(beats) + 1, sizeof(kv_remote_cell))
        if self.names == NULL or self.regions == NULL or self.cells == NULL:
            raise MemoryError
        for i, address in enumerate(self.targets):
            self.names[i].bytes, self.names[i].num_bytes = <const char *>address, len(address)
        for i, (base, num_bytes, key, target) in enumerate(regions):
            self.regions[i] = kv_remote_region(base, num_bytes, key, target)
        for i, (target, base, key, immediate) in enumerate(beats):
            self.cells[i] = kv_remote_cell(base, key, immediate, target)
        self.remote.names, self.remote.num_names = self.names, <uint32_t>len(self.targets)
        self.remote.regions, self.remote.num_regions = self.regions, <uint32_t>len(regions)
        self.remote.cells, self.remote.num_cells = self.cells, <uint32_t>len(beats)

    def __dealloc__(self):
        free(self.names)
        free(self.regions)
        free(self.cells)


cdef list _on_step(list pollers, parts, const int64_t[:, ::1] orders, const int32_t[:, ::1] pages,
                   const uint64_t[:, ::1] edges, uint64_t deadline_ns, bint joins):
    """See `begin_step`; or `join_step`."""
    cdef kv_error e
    cdef kv_poller *raw_pollers[KV_MAX_POLLERS]
    cdef kv_part raw_parts[KV_MAX_STREAMS]
    cdef uint64_t tickets[KV_MAX_STREAMS]
    cdef uint64_t latest = _LONGEST_NS - kv_now_ns()
    cdef Py_ssize_t num = orders.shape[0], wrong
    cdef uint32_t num_parts = 0, num_pollers = 0
    cdef Poller poller
    cdef c_bool ok
    if orders.shape[1] != 10 or pages.shape[1] != 2 or edges.shape[1] != 4:
        raise ValueError("orders has 10 columns, pages 2 and edges 4")
    if len(parts) > KV_MAX_STREAMS:
        raise ValueError(f"a step on {len(parts)} layer counters; want 1 to {KV_MAX_STREAMS}")
    for poller in pollers:
        raw_pollers[num_pollers] = poller.poller
        num_pollers += 1
    for counter, number, mask in parts:
        raw_parts[num_parts] = kv_part(counter, 0 if joins else number, mask)
        tickets[num_parts] = number if joins else 0
        num_parts += 1
    cdef kv_order *raw = <kv_order *>calloc(num + 1, sizeof(kv_order))
    if raw == NULL:
        raise MemoryError
    try:
        wrong = _read_orders(orders, pages, edges, raw)
        if wrong >= 0:
            raise ValueError(f"transfer {wrong}: {list(orders[wrong])} of {pages.shape[0]} page pairs and "
                             f"{edges.shape[0]} edges: a number or a slice is out of range")
        if joins:
            ok = kv_join_step(raw_pollers, num_pollers, raw_parts, num_parts, tickets, raw, num, &e)
        else:
            ok = kv_begin_step(raw_pollers, num_pollers, raw_parts, num_parts, raw, num,
                               deadline_ns if deadline_ns < latest else latest, tickets, &e)
    finally:
        free(raw)
    if not ok:
        raise _error(&e)
    return [tickets[i] for i in range(num_parts)]


def begin_step(pollers, parts, const int64_t[:, ::1] orders, const int32_t[:, ::1] pages,
               const uint64_t[:, ::1] edges, uint64_t deadline_ns):
    """Arms transfers on all pollers of a messenger: all of them, or none. Each goes where its link belongs.

    Args:
        pollers: Every poller of the messenger, by `index`.
        parts: (counter, num_bumps, pollers): as `Poller.begin_step`, and a mask of the pollers that watch the counter
            for this step, which all have it under the same index. They get the same ticket; the step ends once, when
            all of them are through with it.

    The rest as `Poller.begin_step`.
    """
    return _on_step(_all_pollers(pollers), parts, orders, pages, edges, deadline_ns, False)


def join_step(pollers, parts, const int64_t[:, ::1] orders, const int32_t[:, ::1] pages, const uint64_t[:, ::1] edges):
    """Adds transfers to a step that was begun on all pollers of a messenger; only those with orders hear of it.

    Args:
        parts: (counter, ticket, pollers): as `Poller.join_step`, and the mask as for `begin_step`.

    The rest as `Poller.join_step`.
    """
    _on_step(_all_pollers(pollers), parts, orders, pages, edges, 0, True)


cdef list _all_pollers(pollers):
    listed = list(pollers)
    if not 1 <= len(listed) <= KV_MAX_POLLERS:
        raise ValueError(f"{len(listed)} pollers: want 1 to {KV_MAX_POLLERS}")
    for index, poller in enumerate(listed):
        if (<Poller?>poller).index != index or (<Poller>poller).num_pollers != len(listed):
            raise ValueError(f"poller {index} of {len(listed)} was made as {(<Poller>poller).index} of "
                             f"{(<Poller>poller).num_pollers}")
    return listed


cdef bint _is_slice(int64_t start, int64_t stop, Py_ssize_t num) noexcept nogil:
    return 0 <= start <= stop <= num


cdef Py_ssize_t _read_orders(const int64_t[:, ::1] orders, const int32_t[:, ::1] pages, const uint64_t[:, ::1] edges,
                             kv_order *out) noexcept nogil:
    """Fills `out`. Returns the first order that makes no sense, or -1."""
    cdef const int64_t *order
    cdef Py_ssize_t i, k
    for i in range(orders.shape[0]):
        order = &orders[i, 0]
        for k in range(5):
            if not 0 <= order[k] <= UINT32_MAX:
                return i
        if not (0 <= order[5] <= 1 and _is_slice(order[6], order[7], pages.shape[0]) and
                _is_slice(order[8], order[9], edges.shape[0])):
            return i
        out[i].part, out[i].link, out[i].template = <uint32_t>order[0], <uint32_t>order[1], <uint32_t>order[2]
        out[i].imm, out[i].tag, out[i].ready = <uint32_t>order[3], <uint32_t>order[4], <c_bool>order[5]
        out[i].chunk.num_pages, out[i].chunk.num_edges = order[7] - order[6], order[9] - order[8]
        out[i].chunk.pages = &pages[order[6], 0] if order[7] > order[6] else NULL
        out[i].chunk.edges = &edges[order[8], 0] if order[9] > order[8] else NULL
    return -1


@cython.no_gc_clear  # the thread reads the state and the counters until __dealloc__ has joined it
cdef class Poller:
    """One thread that posts, polls, watches layer counters and counts what lands.

    It has one libfabric domain a network interface, or one a link where the provider shares locks between processes
    (shm).

    The thread starts with the first link or step; regions are registered before. Every method may be called from any
    thread.

    Args:
        provider: As libfabric names it.
        state: What landed rows are counted in.
        nics: The local address of each network interface; equal ones are allowed. Ignored by shm, but for their number.
        core: CPU the thread is pinned to; -1 for none.
        cq_entries: Size of the completion queue of each interface: all windows granted to peers plus all own
            operations.
        spin: Poll without pause while busy. None: only if there are more than 2 CPUs; otherwise naps of 20-50 us.
        spin_ns: Quiet time before the first nap or sleep.
        sleep_max_ns: Longest sleep while idle; a command ends it.
        max_write_bytes: Neighbouring runs are merged up to this.
        link_bytes: About the bytes in flight on a link.
        op_timeout_ns: A link fails when its oldest operation, or the provider's refusal, is older.
        heartbeat_ns: Every connected link writes its heartbeats so often.
        lease_ns: A link fails when no heartbeat of its peer has landed for so long, by this process's clock.
        first_lease_ns: The same until the first has landed, if it is longer: the peer may still be getting ready.
        shared_endpoint: All links of an interface land and send through one port (an endpoint and the registrations of
            its regions); for providers whose queue pairs are scarce. See `rotate`.
        index: Its place among the pollers of its messenger, which count into one state file.
        num_pollers: How many these are. No two of them give a link the same id.

    Raises:
        NativeError: the provider is unknown, refused or cannot be opened.
        OSError: shm, and no real-time signal is free to watch over its calls.
    """

    cdef kv_poller *poller
    cdef object __weakref__
    cdef StateFile state
    cdef list counters
    cdef list owners
    cdef uint32_t num_nics
    cdef readonly uint32_t index, num_pollers
    cdef readonly str provider
    cdef readonly int fd
    cdef readonly bint closed, fence_proven

    def __cinit__(self, str provider, StateFile state not None, *, nics=("127.0.0.1",), int core=-1,
                  uint32_t cq_entries=8192, spin=None, uint64_t spin_ns=50_000, uint64_t sleep_max_ns=8_000_000,
                  uint32_t max_write_bytes=1 << 20, uint64_t link_bytes=1 << 20, uint64_t op_timeout_ns=5_000_000_000,
                  uint64_t heartbeat_ns=500_000_000, uint64_t lease_ns=2_000_000_000,
                  uint64_t first_lease_ns=0, bint shared_endpoint=False, uint32_t index=0, uint32_t num_pollers=1):
        cdef kv_error e
        cdef kv_config config
        cdef bytes raw_provider = provider.encode()
        cdef const char *addresses[KV_MAX_NICS]
        cdef bytes raw_nic
        raw_nics = [None if nic is None else nic.encode() for nic in nics]   # kept while `addresses` point into them
        state._check(True)
        if core < -1 or core >= 1024 or not cq_entries or not max_write_bytes or not link_bytes or not sleep_max_ns:
            raise ValueError("core, cq_entries, max_write_bytes, link_bytes or sleep_max_ns is out of range")
        if not heartbeat_ns or lease_ns < 2 * heartbeat_ns or lease_ns < 4 * sleep_max_ns:
            raise ValueError(f"a lease of {lease_ns} ns: want at least two heartbeats ({heartbeat_ns} ns) and four "
                             f"times the longest sleep ({sleep_max_ns} ns), and heartbeats")
        if not index < num_pollers <= KV_MAX_POLLERS:
            raise ValueError(f"poller {index} of {num_pollers}: want less than that, and at most {KV_MAX_POLLERS}")
        if not 1 <= len(raw_nics) <= KV_MAX_NICS:
            raise ValueError(f"{len(raw_nics)} network interfaces: want 1 to {KV_MAX_NICS}")
        for i, raw_nic in enumerate(raw_nics):
            addresses[i] = NULL
            if raw_nic is not None:
                addresses[i] = raw_nic
        config.provider = raw_provider
        config.nics, config.num_nics = addresses, <uint32_t>len(raw_nics)
        config.index, config.num_pollers = index, num_pollers
        config.core = core
        config.cq_entries = cq_entries
        config.spin = (os.cpu_count() or 1) > 2 if spin is None else spin
        config.spin_ns = spin_ns
        config.sleep_max_ns = sleep_max_ns
        config.max_write_bytes = max_write_bytes
        config.link_bytes = link_bytes
        config.op_timeout_ns = op_timeout_ns
        config.heartbeat_ns = heartbeat_ns
        config.lease_ns = lease_ns
        config.first_lease_ns = first_lease_ns
        config.shared_endpoint = shared_endpoint
        self.state = state
        self.counters = []
        self.owners = []
        with nogil:
            self.poller = kv_poller_open(&config, state.state, &e)
        if self.poller == NULL:
            raise _error(&e, provider)
        _open_pollers.add(self)
        self.num_nics = config.num_nics
        self.index, self.num_pollers = index, num_pollers
        self.provider = kv_fabric_provider(&self.poller.nics.fabric).decode()
        # Whether closing a link under traffic is known to stop what lands, and to harm nothing else.
        self.fence_proven = self.poller.nics.fabric.fence_proven
        self.fd = self.poller.records.bell.fd

    def __dealloc__(self):
        cdef c_bool joined
        if self.poller == NULL:
            return
        with nogil:
            joined = kv_poller_close(self.poller)
            kv_poller_free(self.poller)
        if not joined:
            _kept_for_good.append((self.state, self.counters, self.owners))

    def close(self):
        """Stops the thread, ends every link and transfer, closes the domain. Idempotent.

        Records made until then can still be taken.

        Raises:
            NativeError: the thread is stuck inside libfabric. What it may still use is never freed.
        """
        cdef c_bool joined
        self.closed = True
        with nogil:
            joined = kv_poller_close(self.poller)
        if not joined:
            raise NativeError(f"the polling thread is stuck in libfabric ({self.provider}): its memory is never freed",
                              "pthread_join", _ETIMEDOUT, self.provider)
        self.counters = []
        self.owners = []

    def self_test(self):
        """Writes with immediate through each network interface, as production does. Before the first link or step.

        Raises:
            NativeError: names the call that failed and what was seen.
        """
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_poller_self_test(self.poller, &e)
        if not ok:
            raise _error(&e, self.provider)

    def register(self, uint64_t address, uint64_t num_bytes, owner=None, nics=None):
        """Registers source memory, without remote access, with some of the network interfaces (None: all), whose links
        offer it to their peers. Returns its region index, which it has even if there are none: it is another poller's
        then. `owner` is kept until the close.
        """
        cdef kv_error e
        cdef uint64_t mask = 0
        for nic in range(self.num_nics) if nics is None else nics:
            if not 0 <= nic < self.num_nics:
                raise ValueError(f"network interface {nic} of {self.num_nics}")
            mask |= <uint64_t>1 << <int>nic
        cdef int64_t index = kv_register(self.poller, address, num_bytes, mask, &e)
        if index < 0:
            raise _error(&e, self.provider)
        self.owners.append(owner)
        return index

    def add_counter(self, LayerCounter counter not None):
        """Watches `counter` until the poller closes. Returns its index. A counter serves one poller in its life, or
        the pollers of one messenger.
        """
        cdef kv_error e
        counter._watch(self.state, self.index)
        cdef int64_t index = kv_add_stream(self.poller, counter.counter, counter.turns, &e)
        if index < 0:
            raise _error(&e, self.provider)
        counter.watched_by = self.state
        counter.watchers |= <uint64_t>1 << self.index
        self.counters.append(counter)
        return index

    def open_link(self, keys, uint32_t nic=0):
        """Begins to open an endpoint on a network interface that a peer may write to, with a key for each region of
        that interface, by index, and the last for the cell that its heartbeats go to. Returns the link's id.

        A LINK_OPENED or LINK_FAILED record follows. Either way it is closed by `close_link`. With a shared endpoint
        the first link's keys are those of its interface's port; others take what there is, as `link_regions` says.
        """
        cdef kv_error e
        cdef int64_t link
        cdef _Keys lists = _Keys([keys])
        with nogil:
            link = kv_open_link(self.poller, nic, lists.lists[0].keys, lists.lists[0].num, &e)
        if link < 0:
            raise _error(&e, self.provider)
        return link

    def link_address(self, uint32_t link):
        """The endpoint's address, for the peer. After LINK_OPENED."""
        cdef kv_error e
        cdef uint8_t name[KV_NAME_BYTES]
        cdef int64_t num = kv_link_name(self.poller, link, name, &e)
        if num < 0:
            raise _error(&e, self.provider)
        return PyBytes_FromStringAndSize(<char *>name, num)

    def link_regions(self, uint32_t link):
        """(base, bytes, key) of each region of its network interface, for the peer. After LINK_OPENED."""
        cdef kv_error e
        cdef kv_remote_region regions[KV_MAX_REGIONS]
        cdef int64_t num = kv_link_regions(self.poller, link, regions, &e)
        if num < 0:
            raise _error(&e, self.provider)
        return [(regions[i].base, regions[i].bytes, regions[i].key) for i in range(num)]

    def link_cell(self, uint32_t link):
        """(base, bytes, key) of where the peer's heartbeats go. After LINK_OPENED."""
        cdef kv_error e
        cdef kv_remote_region cell
        if not kv_link_cell(self.poller, link, &cell, &e):
            raise _error(&e, self.provider)
        return cell.base, cell.bytes, cell.key

    def connect_link(self, uint32_t link, targets, regions, uint32_t window, beats):
        """Pairs the link with endpoints of a peer, and begins to send heartbeats and to expect them. After LINK_OPENED.

        Args:
            targets: `link_address` of each endpoint of the peer that this link writes to, or is written to by.
            regions: (base, bytes, key, target) of the peer's regions, by `link_regions` of its links.
            window: Operations in flight that the peer grants; heartbeats come on top.
            beats: (target, base, key, immediate) of the cells that heartbeats go to; the immediates carry no rows.
        """
        cdef kv_error e
        cdef c_bool ok
        cdef _Remote peer = _Remote(targets, regions, beats)
        with nogil:
            ok = kv_connect_link(self.poller, link, &peer.remote, window, &e)
        if not ok:
            raise _error(&e, self.provider)

    def close_link(self, uint32_t link, bint fence=True):
        """Begins to close the link. What it has left ends with STOPPED records; LINK_CLOSED is its last.

        Args:
            fence: With a shared endpoint LINK_CLOSED waits until the port that the peer may write to is closed. Where
                nothing can come any more (the peer has said so, and all was counted) False spares that.
        """
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_close_link(self.poller, link, fence, &e)
        if not ok:
            raise _error(&e, self.provider)

    def rotate(self, keys):
        """Begins to open another port on every network interface; `keys` has a list for each, with a key for each of
        its regions. PORT_OPENED (id: number) follows when all are open, or PORT_FAILED and none is.

        From PORT_OPENED on `link_address` and `link_regions` of every open link are the new port's; a link's own
        writes go through it as soon as none of them is in flight. The cells keep their keys. The ports before stay
        open, for peers that still write to them, until `close_port`; there are never more than the two generations.

        Raises:
            RuntimeError: links have a port each, or the ports before are still open or others being opened.
        """
        cdef kv_error e
        cdef c_bool ok
        cdef _Keys lists = _Keys(list(keys))
        with nogil:
            ok = kv_rotate_port(self.poller, lists.lists, lists.num, &e)
        if not ok:
            raise _error(&e, self.provider)

    def close_port(self, uint32_t port=0):
        """Begins to close the older port, or the only one, on every network interface; `port` other than 0 must be its
        number.

        PORT_CLOSED says that nothing can land through any of them and that all that had landed is counted. LINK_CLOSED
        follows for closing links whose peers knew no newer port. Links that live finish their writes first.
        """
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_close_port(self.poller, port, &e)
        if not ok:
            raise _error(&e, self.provider)

    def retarget_link(self, uint32_t link, targets, regions, beats):
        """The peer has rotated: points the link to where it is now. Arguments as of `connect_link`, and as many.

        Posting is held from now on, and heartbeats go to the new cells at once. LINK_HELD says that nothing posted
        before is in flight; `resume_link` lets the link go on.

        Raises:
            ValueError: base, size or target of a region, or the target of heartbeats, differ from before.
        """
        cdef kv_error e
        cdef c_bool ok
        cdef _Remote peer = _Remote(targets, regions, beats)
        with nogil:
            ok = kv_retarget_link(self.poller, link, &peer.remote, &e)
        if not ok:
            raise _error(&e, self.provider)

    def resume_link(self, uint32_t link):
        """Lets a link go on that LINK_HELD was reported of."""
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_resume_link(self.poller, link, &e)
        if not ok:
            raise _error(&e, self.provider)

    def add_template(self, uint32_t link, const uint64_t[:, ::1] runs, src_page, dst_page,
                     const int64_t[:, ::1] entries, uint64_t row_bytes, uint64_t item_bytes):
        """Adds what is common to all transfers of one pair of layouts. Lives until the link is closed.

        Args:
            runs: uint64 (n, 4): source offset, destination offset, bytes, rows within a pair of units.
            src_page: (page bytes, units a page, unit bytes): unit u lies at u // units * page bytes + u % units * unit
                bytes. Where both sides have pages of one size a page is a unit: (page bytes, 1, 0).
            dst_page: The same of the destination.
            entries: int64 (m, 5): source region and base, destination region and base, signal; by signal. All writes of
                a transfer are posted for every entry, once the step shows `signal` bumps. Source regions are numbered
                as `register` did, and must be on the link's interface; destination regions as `connect_link` got them.
            row_bytes: A run that is too long for one write is split at multiples of this.
            item_bytes: Bytes of one element of a row.

        Returns:
            The template's index.
        """
        cdef kv_error e
        cdef kv_template_spec spec
        if runs.shape[1] != 4 or entries.shape[1] != 5:
            raise ValueError("runs has 4 columns and entries 5")
        spec.num_runs, spec.num_entries = <uint32_t>runs.shape[0], <uint32_t>entries.shape[0]
        spec.runs = <const kv_run *>&runs[0, 0] if runs.shape[0] else NULL
        spec.entries = <const kv_entry_spec *>&entries[0, 0] if entries.shape[0] else NULL
        spec.src_page.page_bytes, spec.src_page.units, spec.src_page.unit_bytes = src_page
        spec.dst_page.page_bytes, spec.dst_page.units, spec.dst_page.unit_bytes = dst_page
        spec.row_bytes, spec.item_bytes = row_bytes, item_bytes
        cdef int64_t template = kv_add_template(self.poller, link, &spec, &e)
        if template < 0:
            raise _error(&e, self.provider)
        return template

    def begin_step(self, parts, const int64_t[:, ::1] orders, const int32_t[:, ::1] pages,
                   const uint64_t[:, ::1] edges, uint64_t deadline_ns):
        """Arms transfers for the next forward pass on some layer counters: all of them, or none.

        Args:
            parts: (counter, num_bumps) of each layer counter that the pass runs on, with the bumps that it must show
                there; no entry of a transfer of that part may wait for more.
            orders: int64 (n, 10), a transfer each: part, link, template, immediate, tag, ready (0 or 1; a ready one is
                posted at once), and its slices of pages and edges: page start, page stop, edge start, edge stop.
            pages: int32 (m, 2): source and destination unit of each pair.
            edges: uint64 (k, 4): runs relative to the entries' bases, for units that are filled in part.
            deadline_ns: From now.

        Returns:
            A ticket for each part, never 0.

        Raises:
            ValueError: a write would leave its region, or an argument makes no sense. Nothing was armed.
            RingFullError: too many steps are outstanding. Nothing was armed.
        """
        return _on_step([self], [(*part, 1) for part in parts], orders, pages, edges, deadline_ns, False)

    def join_step(self, parts, const int64_t[:, ::1] orders, const int32_t[:, ::1] pages, const uint64_t[:, ::1] edges):
        """Adds transfers to steps that were begun before: what those have shown already is posted at once, the rest as
        they show it. They end with their step, and are all posted at once when it is over and was complete.

        Where that is not known any more, where the step failed or was abandoned, or a transfer waits for more bumps
        than it has, the transfers are lost: a JOIN_LOST record for each tag, then they end with STOPPED and 0 rows.

        Args:
            parts: (counter, ticket) of each step.
            orders: As for `begin_step`; none is ready.

        Raises:
            ValueError: as `begin_step`. Nothing was armed.
            RingFullError: the poller has too much to do yet. Nothing was armed.
        """
        _on_step([self], [(*part, 1) for part in parts], orders, pages, edges, 0, True)

    def abandon(self, uint32_t counter, uint64_t ticket):
        """The step will not run: its transfers end with STOPPED records and its ring slot comes back."""
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_abandon(self.poller, counter, ticket, &e)
        if not ok:
            raise _error(&e, self.provider)

    def resume_counter(self, uint32_t counter, uint64_t ticket):
        """Answers a STEP_FAULT record, after what must not be posted because of it was stopped.

        A step that was over before it had shown all its bumps holds back what later steps of its counter show, whether
        they were begun already or not, and what joins them. This lets it go, unless another such step holds it."""
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_resume_stream(self.poller, counter, ticket, &e)
        if not ok:
            raise _error(&e, self.provider)

    def stop(self, uint32_t link, uint32_t tag):
        """Drops what is not posted yet of every transfer with this tag; each ends with a STOPPED record."""
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_stop_tag(self.poller, link, tag, &e)
        if not ok:
            raise _error(&e, self.provider)

    def take(self, unsigned max_records=256):
        """Up to `max_records` <= 1024 of (kind, id, value, t_ns, extra); `fd` stays readable while there are more."""
        cdef kv_record records[1024]
        if not 1 <= max_records <= 1024:
            raise ValueError("a batch has 1 to 1024 records")
        cdef unsigned num = kv_take(self.poller, records, max_records)
        return [(records[i].kind, records[i].id, records[i].value, records[i].t_ns, records[i].extra)
                for i in range(num)]

    def stats(self):
        """What the thread has done so far, by name."""
        cdef uint64_t values[KV_NUM_STATS]
        kv_stats_read(self.poller, values)
        return {kv_stats_names[i].decode(): values[i] for i in range(KV_NUM_STATS)}

    def inject(self, str kind, uint64_t nth):
        """Spoils the nth write from now, once: "drop" pretends it was sent, "flip" sends a copy with one byte flipped,
        "fail" lets the post fail and with it the link.
        """
        cdef kv_error e
        if kind not in _FAULTS or kind == "reorder":
            raise ValueError(f"there is no fault {kind!r}: drop, flip or fail")
        if not kv_inject(self.poller, <kv_fault><int>_FAULTS[kind], nth, &e):
            raise _error(&e, self.provider)

    def disturb(self, uint64_t seed, *, double drop=0.0, double flip=0.0, double fail=0.0, double reorder=0.0,
                uint64_t slow_ns=0):
        """Spoils each write from now on with these chances, and pauses for `slow_ns` between rounds.

        The same seed decides the same about the nth write from now. "reorder" sets a write aside until 1 to 4 later
        ones of its link are posted, or nothing else is left; the others as in `inject`.
        """
        cdef kv_error e
        cdef kv_disturbance order
        order.seed, order.slow_ns = seed, slow_ns
        order.chance[<int>KV_FAULT_DROP], order.chance[<int>KV_FAULT_FLIP] = drop, flip
        order.chance[<int>KV_FAULT_FAIL], order.chance[<int>KV_FAULT_REORDER] = fail, reorder
        if slow_ns >= 1_000_000_000:
            raise ValueError(f"a pause of {slow_ns} ns between rounds: want less than a second")
        if not kv_disturb(self.poller, &order, &e):
            raise _error(&e, self.provider)

    def hold(self, bint hold):
        """While held, what lands stays unseen: no completion queue is read, but posting goes on.

        Leases are not judged meanwhile, and begin anew afterwards; our heartbeats wait for the completion of the one
        before, so a peer may lose us. A closing link is still closed. When this returns, it is so.
        """
        cdef kv_error e
        cdef c_bool ok
        with nogil:
            ok = kv_hold(self.poller, hold, &e)
        if not ok:
            raise _error(&e, self.provider)

    def trace(self, uint32_t capacity):
        """Notes from now on when each entry of each transfer is first posted; what finds no room is left out."""
        cdef kv_error e
        if not kv_trace_on(self.poller, capacity, &e):
            raise _error(&e, self.provider)

    def take_trace(self):
        """(tag, entry index, bumps seen, t_ns) of what was noted since the last call."""
        cdef kv_mark marks[256]
        cdef uint32_t num = 256
        taken = []
        while num == 256:
            num = kv_trace_read(self.poller, marks, 256)
            for i in range(num):
                taken.append((marks[i].tag, marks[i].entry_index, marks[i].bumps_seen, marks[i].t_ns))
        return taken
