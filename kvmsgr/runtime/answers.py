"""Failures as control messages, and in the log."""

from __future__ import annotations

import structlog

from kvmsgr.core.failure import Failure
from kvmsgr_protocol import Busy, Cancel, Dispatch, Failed, Reason, Refuse

log = structlog.get_logger("kvmsgr")
WISHES = frozenset({Reason.cancelled, Reason.busy, Reason.refused, Reason.closed, Reason.preempted})


def log_failure(request_id: str, failure: Failure) -> None:
    """What somebody wanted is no reason to warn."""
    say = log.info if failure.reason in WISHES else log.warning
    say("request failed", request_id=request_id, reason=str(failure.reason), detail=failure.detail)


def declined(dispatch: Dispatch, failure: Failure) -> Busy | Refuse:
    """The answer to a request that is not taken."""
    if failure.reason is Reason.busy:
        return Busy(
            request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            reason=failure.detail,
            retry_after_s=failure.retry_after_s,
        )
    return Refuse(request_id=dispatch.request_id, attempt=dispatch.attempt, code=failure.reason, reason=failure.detail)


def failed(request_id: str, attempt: int, failure: Failure) -> Failed:
    """A leg has failed, on either side."""
    return Failed(
        request_id=request_id,
        attempt=attempt,
        code=failure.reason,
        reason=failure.detail,
        rows=failure.rows,
        expected_rows=failure.rows_expected,
    )


def ended(request_id: str, attempt: int, failure: Failure) -> Cancel | Failed:
    """The decoder's end of a leg that is not ready: the prefiller must stop, and say after how many rows."""
    if failure.reason is Reason.cancelled:
        return Cancel(request_id=request_id, attempt=attempt, code=failure.reason, reason=failure.detail)
    return failed(request_id, attempt, failure)


def as_text(reason: object) -> str:
    """Whatever an engine gives as a reason, as text that can travel."""
    return str(reason).encode(errors="replace").decode()
