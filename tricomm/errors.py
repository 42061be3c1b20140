"""Every error tricomm raises on purpose.

A fault ends the group and nothing else: the process, the CUDA context and other groups are unaffected, and the same
processes can make a new communicator.
"""

from __future__ import annotations


class TricommError(Exception):
    """Base of all errors that tricomm raises on purpose."""


class InvalidArgument(TricommError, ValueError):
    """A bad argument. Nothing was sent and no sequence number was consumed."""


class ResourceError(TricommError):
    """The system refused a resource: memory, a descriptor, peer access, a driver call."""


class RendezvousError(TricommError):
    """The ranks did not meet in time, or disagree on rank, world size, version or token."""


class PeerDied(TricommError):
    """A peer's process ended, or closed the group, before it finished the call."""


class PeerStalled(TricommError):
    """A peer's process has sent no heartbeat for longer than the stall limit."""


class CollectiveTimeout(TricommError):
    """A call did not finish within its time limit although all peers are alive."""


class CollectiveMismatch(TricommError):
    """Ranks made different calls at the same sequence number."""


class GroupAborted(TricommError):
    """The group is no longer usable: another rank aborted it, or it is closed."""
