"""Failures as control messages."""

from __future__ import annotations

from kvmsgr.core.failure import Failure
from kvmsgr_protocol import Busy, Dispatch, Failed, Reason, Refuse


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
    """The end of a leg, from either side."""
    return Failed(
        request_id=request_id,
        attempt=attempt,
        code=failure.reason,
        reason=failure.detail,
        rows=failure.rows,
        expected_rows=failure.rows_expected,
    )
