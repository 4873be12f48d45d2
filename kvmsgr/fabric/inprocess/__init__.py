"""A fabric inside one process, in pure Python: for tests and simulations, with faults that replay from a seed.

It keeps the promises of the native poller and breaks those that libfabric breaks: a local completion says nothing of
the target, a target that does not poll takes nothing, and what is in the air may land much later.
"""

from .air import Air, Flight, current_air, use_air
from .poller import InProcessPoller

__all__ = ["Air", "Flight", "InProcessPoller", "current_air", "use_air"]
