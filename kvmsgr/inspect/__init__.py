"""Looking into messengers from outside: their state files are read, no messenger needs to answer."""

from .state import find, host_view, landed_rows, look, snapshot, state_files, unreadable
from .views import HostView, LegView, MessengerView, PagesView, Unreadable

__all__ = [
    "HostView",
    "LegView",
    "MessengerView",
    "PagesView",
    "Unreadable",
    "find",
    "host_view",
    "landed_rows",
    "look",
    "snapshot",
    "state_files",
    "unreadable",
]
