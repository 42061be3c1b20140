"""Queues of bytes between an SM, its GPU's links, and memory. Each queue serves one request after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tricomm.perf.cost_model.machines import Latencies, MachineSpec

# A load requests each line by a flit of 16 bytes (D. Foley, J. Danskin: Ultra-Performance Pascal GPU and NVLink
# Interconnect, IEEE Micro 37, 2017).
_REQUEST, _PACKET = 16, 128


class ByteQueue:
    """A queue that carries `rate` bytes per microsecond."""

    __slots__ = ("free", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.free = rate, 0.0

    def carries(self, nbytes: float, now: float) -> float:
        """Carry `nbytes` that arrive at time `now`; returns the time at which the last byte has passed."""
        self.free = max(self.free, now) + nbytes / self.rate
        return self.free


@dataclass
class RankQueues:
    """The queues of a rank's executed block, which has its share of the links and memory that `blocks` blocks use."""

    machine: MachineSpec
    times: Latencies
    blocks: float
    port_in: ByteQueue = field(init=False)
    port_out: ByteQueue = field(init=False)
    egress: ByteQueue = field(init=False)
    ingress: ByteQueue = field(init=False)
    memory: ByteQueue = field(init=False)

    def __post_init__(self) -> None:
        machine, port = self.machine, self.times.port * self.times.clock
        self.port_in, self.port_out = ByteQueue(port), ByteQueue(port)
        share = 1e3 * machine.kernels / self.blocks
        self.egress, self.ingress = ByteQueue(share), ByteQueue(share)
        self.memory = ByteQueue(1e3 * machine.memory / self.blocks)

    @property
    def one_way(self) -> float:
        """Microseconds from a store until it is in the peer's L2: a hop without the poll that reads it."""
        return max(self.machine.hop - self.times.us(self.times.l2), 0.1)

    @property
    def fence(self) -> float:
        """Microseconds of a system fence without stores in flight: a barrier without its hop and its last poll."""
        return max(self.machine.barrier - self.machine.hop - self.times.us(self.times.l2), 0.0)

    def sends(self, peer: RankQueues, nbytes: float, now: float) -> tuple[float, float]:
        """Send a store of `nbytes`: (the time at which it is in the peer's memory, when its last byte has passed all
        queues).

        Of a partly written sector only the written bytes count, because it is sent with a byte mask.
        """
        # The bytes pass all queues of their path at once. Each queue serves stores in the order of their issue.
        through = max(queue.carries(nbytes, now) for queue in (self.port_out, self.egress, peer.ingress))
        return through + self.one_way, through

    def multicasts(self, peers: Sequence[RankQueues], nbytes: float, now: float) -> list[tuple[float, float]]:
        """`sends` for a store that the switch copies to all `peers`, including this rank. It leaves this GPU once."""
        left = max(queue.carries(nbytes, now) for queue in (self.port_out, self.egress))
        came = [max(left, peer.ingress.carries(nbytes, now)) for peer in peers]
        return [(through + self.one_way, through) for through in came]

    def reduces(self, peers: Sequence[RankQueues], nbytes: float, now: float) -> float:
        """`fetches` for a load that the switch reduces over all `peers`. Only the sum uses this GPU's links."""
        left = max(peer.egress.carries(nbytes, now) for peer in peers)
        through = max(left, *(queue.carries(nbytes, now) for queue in (self.ingress, self.port_in)))
        return through + 2 * self.one_way + self.times.us(self.times.l2)

    def fetches(self, peer: RankQueues, nbytes: float, now: float) -> float:
        """The time at which the data of a load issued at `now` has arrived from the peer's memory."""
        requests = nbytes * _REQUEST / _PACKET
        for queue in (self.egress, peer.ingress):
            queue.carries(requests, now)
        through = max(queue.carries(nbytes, now) for queue in (peer.egress, self.ingress, self.port_in))
        return through + 2 * self.one_way + self.times.us(self.times.l2)
