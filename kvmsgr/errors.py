"""Every error kvmsgr raises.

KvmsgrError
├── ConfigError                 what you passed cannot work
│   ├── LayoutError             a cache, span or chunk is described wrongly
│   ├── FabricUnavailableError  no libfabric provider passed the start-up self-test
│   ├── AddressError            an address cannot be listened on, or is none
│   ├── SharedMemoryError       memory cannot be allocated for two processes, or mapped by the other one
│   └── MismatchError           two messengers do not fit together
│       └── LayoutMismatchError
├── ProtocolError (abstract)    a control message broke the rules
│   ├── LocalProtocolError      a call came in a state that does not allow it
│   │   └── ContextReleasedError the context of a request was read or written after its slot was given back
│   └── RemoteProtocolError     the peer did it
├── TransferError               one request failed; carries the reason code both sides share
│   ├── AdmissionError
│   │   ├── BusyError           try again later
│   │   └── RefusedError        will not be served
│   ├── FabricError             libfabric said no
│   ├── PeerLostError           the peer's connection ended
│   ├── IncompatiblePeerError   the peer serves another model, or its cache does not fit ours
│   ├── TransferTimeout         the time allowed ran out
│   ├── CountError              carries rows landed and expected
│   │   ├── ShortCountError     all writes were posted, fewer rows landed
│   │   └── CountOverflowError  more rows landed than were expected
│   ├── StepFaultError          a forward pass ran fewer or more layers than announced, or none in time
│   ├── EngineFailedError       the engine on one side gave the request up
│   ├── PreemptedError          the prefiller took its pages back, and the request was not tried again
│   ├── RankLostError           a process of one side's engine that holds a rank has died
│   ├── RequestCancelledError   the decoder's engine cancelled it
│   ├── PeerProtocolError       the peer broke the rules, or does not know the request
│   └── ClosedError             one of the two messengers closed
├── WorkersError                the processes that hold a node's ranks do not come together, or not stay so
│   ├── WorkersMissingError     not every rank's process came in time; names those that are missing
│   ├── WorkerRefusedError      what a process says it holds cannot be used; raised on both sides
│   ├── WorkerLostError         the process of a rank has ended, or ended its link
│   └── LeadLostError           the lead process does not answer, or has ended
├── PagesQuarantined            a request is over, and it is not proven yet that nothing can land in its pages
├── FabricStuckError            the polling thread does not come back out of libfabric
├── StateFileError              a state file cannot be read: another kvmsgr made it, or it is none
├── StepLimitError              more steps are announced than a layer counter can tell apart
└── MessengerClosedError        a call came after close
"""

from __future__ import annotations

from kvmsgr_protocol import Reason


class KvmsgrError(Exception):
    """Base of every error of this package."""


class ConfigError(KvmsgrError):
    """Something that was passed in cannot work."""


class LayoutError(ConfigError):
    """A cache, a span or a chunk is described wrongly."""


class FabricUnavailableError(ConfigError):
    """No libfabric provider can be used; the message says what each one answered."""


class AddressError(ConfigError):
    """An address cannot be listened on, or is none."""


class SharedMemoryError(ConfigError):
    """Memory cannot be allocated so that another process can map it, or cannot be mapped by that process."""


class MismatchError(ConfigError):
    """Two messengers cannot work together: `field` differs.

    Args:
        field: Name of the first field that differs.
        ours: Value on this side.
        theirs: Value on the other side.
        advice: What to do.
        text: The whole message, where one of two values that differ would not be understood.
    """

    def __init__(
        self, field: str, ours: object, theirs: object, advice: str = "both sides must agree", *, text: str = ""
    ) -> None:
        super().__init__(text or f"{field} differs: ours is {ours!r}, theirs is {theirs!r}; {advice}")
        self.field, self.ours, self.theirs = field, ours, theirs


class LayoutMismatchError(MismatchError):
    """Two cache layouts between which nothing can be moved correctly."""


class ProtocolError(KvmsgrError):
    """A rule of the protocol was broken; see the two subclasses."""

    def __init__(self, message: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("ProtocolError is abstract: raise LocalProtocolError or RemoteProtocolError")
        super().__init__(message)


class LocalProtocolError(ProtocolError):
    """A call came in a state that does not allow it."""


class ContextReleasedError(LocalProtocolError):
    """The context of a request was asked for after its slot was given back: another request's may stand there.

    Args:
        request_id: The request.
        why: When it was given back, and what to do.
    """

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__(f"request {request_id!r} has no context any more: {why}")
        self.request_id, self.why = request_id, why


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class TransferError(KvmsgrError):
    """One request failed. `reason` is the same on both sides; `request_id` names the request."""

    reason: Reason

    def __init__(self, request_id: str, detail: str, reason: Reason | None = None) -> None:
        if reason is not None:
            self.reason = reason
        super().__init__(f"request {request_id!r}: {detail} [{self.reason}]")
        self.request_id, self.detail = request_id, detail


class AdmissionError(TransferError):
    """The prefiller did not take the request."""

    reason = Reason.refused


class BusyError(AdmissionError):
    """The prefiller is busy; `retry_after_s` is its advice, None when it gave none."""

    reason = Reason.busy

    def __init__(
        self, request_id: str, detail: str, reason: Reason | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(request_id, detail, reason)
        self.retry_after_s = retry_after_s


class RefusedError(AdmissionError):
    """The prefiller will not serve the request."""

    reason = Reason.refused


class FabricError(TransferError):
    """A libfabric operation failed, and with it the whole epoch of that peer."""

    reason = Reason.fabric


class PeerLostError(TransferError):
    """The connection to the peer ended while the request was alive."""

    reason = Reason.peer_lost


class IncompatiblePeerError(TransferError):
    """The two messengers do not fit together; the detail names the field and both values."""

    reason = Reason.layout_mismatch


class TransferTimeout(TransferError):
    """The time allowed ran out."""

    reason = Reason.timeout


class CountError(TransferError):
    """The rows that landed are not the rows expected; carries both numbers."""

    def __init__(
        self,
        request_id: str,
        detail: str,
        reason: Reason | None = None,
        rows_landed: int = 0,
        rows_expected: int = 0,
    ) -> None:
        super().__init__(request_id, detail, reason)
        self.rows_landed, self.rows_expected = rows_landed, rows_expected


class ShortCountError(CountError):
    """The sender posted every row, and no more rows land."""

    reason = Reason.short_count


class CountOverflowError(CountError):
    """More rows landed than the request has."""

    reason = Reason.overflow


class StepFaultError(TransferError):
    """A step ran fewer or more layers than announced, or did not end in time."""

    reason = Reason.step_fault


class EngineFailedError(TransferError):
    """The engine of one side gave the request up."""

    reason = Reason.engine


class PreemptedError(TransferError):
    """The prefiller's engine took the pages of the request back. A fetch of this package tries again by itself, so that
    only a peer that fails a request for this reason makes it raise this."""

    reason = Reason.preempted


class RankLostError(TransferError):
    """A process of the engine on one side, which holds a rank's memory, has died; the detail says which and how."""

    reason = Reason.rank_lost


class RequestCancelledError(TransferError):
    """The engine of the decoder no longer wanted the request."""

    reason = Reason.cancelled


class WorkersError(KvmsgrError):
    """The worker processes of a node and its lead do not come together, or not stay so; see the subclasses."""


class WorkersMissingError(WorkersError):
    """Not every rank's process came in time.

    Args:
        ranks: Those that have not said what they hold.
        detail: How far each of them came, and who was turned away.
    """

    def __init__(self, ranks: tuple[int, ...], detail: str) -> None:
        super().__init__(f"no memory came from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {detail}")
        self.ranks, self.detail = ranks, detail


class WorkerRefusedError(WorkersError):
    """What the process of a rank says cannot be used; its lead and the process raise the same.

    Args:
        rank: As the process names itself.
        why: What was said, and what is needed.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"the worker of rank {rank} is refused: {why}")
        self.rank, self.why = rank, why


class WorkerLostError(WorkersError):
    """The process of a rank has ended, or ended its link to the lead. Nothing computes that rank any more; its memory
    stays mapped in the lead, so that what is being read of it or written to it does no harm.

    Args:
        rank: Number of the rank.
        pid: Its process.
        how: How it ended, as far as it is known.
    """

    def __init__(self, rank: int, pid: int, how: str) -> None:
        super().__init__(f"the worker of rank {rank} (pid {pid}) is lost: {how}")
        self.rank, self.pid, self.how = rank, pid, how


class LeadLostError(WorkersError):
    """The lead process does not answer, or has ended."""


class PagesQuarantined(KvmsgrError):
    """A request is over, and it is not proven that no write of it can land any more: its pages must not be used.

    The messenger holds them and gives them back by itself; `Fetch.released()` says when. It takes this long with a peer
    whose polling thread runs while its Python does not answer, and with a lost one on a provider whose endpoints
    cannot be closed safely under traffic.

    Args:
        request_id: The request.
        why: What is missing to prove it.
    """

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__(
            f"request {request_id!r} is over, but writes of it may still land in its pages: {why}. Do not use the "
            "pages before released() returns; closing the messenger frees them too"
        )
        self.request_id, self.why = request_id, why


class FabricStuckError(KvmsgrError):
    """The polling thread hangs inside libfabric, as after a shm peer was killed while it held a lock of ours. Nothing
    moves any more: close the messenger and open another; the memory of this one is never freed."""


class StateFileError(KvmsgrError):
    """A state file cannot be read: another version of kvmsgr made it, or it is none, or not ready yet."""


class StepLimitError(KvmsgrError):
    """More steps are announced than a layer counter has ring slots. Nothing was armed: let one run, then try again."""


class PeerProtocolError(TransferError):
    """The peer broke the protocol, or does not know the request."""

    reason = Reason.protocol


class ClosedError(TransferError):
    """A messenger closed while the request was alive."""

    reason = Reason.closed


class MessengerClosedError(KvmsgrError):
    """The messenger is closed."""


_BY_REASON: dict[Reason, type[TransferError]] = {
    Reason.refused: RefusedError,
    Reason.duplicate: RefusedError,
    Reason.fabric: FabricError,
    Reason.peer_lost: PeerLostError,
    Reason.layout_mismatch: IncompatiblePeerError,
    Reason.identity_mismatch: IncompatiblePeerError,
    Reason.timeout: TransferTimeout,
    Reason.step_fault: StepFaultError,
    Reason.engine: EngineFailedError,
    Reason.preempted: PreemptedError,
    Reason.rank_lost: RankLostError,
    Reason.cancelled: RequestCancelledError,
    Reason.protocol: PeerProtocolError,
    Reason.unknown_request: PeerProtocolError,
    Reason.closed: ClosedError,
}


def transfer_error(
    request_id: str,
    reason: Reason,
    detail: str,
    rows: int = 0,
    rows_expected: int = 0,
    retry_after_s: float | None = None,
) -> TransferError:
    """The error of the class that belongs to `reason`."""
    match reason:
        case Reason.short_count:
            return ShortCountError(request_id, detail, reason, rows, rows_expected)
        case Reason.overflow:
            return CountOverflowError(request_id, detail, reason, rows, rows_expected)
        case Reason.busy:
            return BusyError(request_id, detail, reason, retry_after_s)
    return _BY_REASON.get(reason, TransferError)(request_id, detail, reason)
