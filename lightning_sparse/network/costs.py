"""What a message costs: bytes on the wire, hops that follow each other, and by both the way that a sum takes."""

import math
from dataclasses import dataclass

HOP_BYTES = 8 * 1024  # until a link is measured
MOST_LATENCY_BYTES = 2**26  # the most that a link is taken to carry in its latency
SEGMENT_BYTES = 512 * 1024  # long messages are sent in segments: one is on the wire while another is being added
DEVICE_SEGMENT_BYTES = 32 * 2**20  # likewise where a device adds them, of which a launch takes some 5 µs of the host

# Messages that follow each other during backward: the shorter they are, the less is left after it, but the more often
# a latency is waited for, and a processor works for it, 1 or 2 ms.  Each transfers for ``LONG`` times its latency, at
# least, and where processors train for ``LONG_S`` seconds (docs/benchmarks/2026-11-27-short-messages.md).
LONG, LONG_S = 3, 0.025
MOST_MESSAGE_BYTES = 25 * 2**20  # of such a message: as long as DDP's buckets

QUEUE_BYTES = 64 * 1024  # that reach a rank from all others at once: what a queue in front of it always holds
CROWD = 4  # what a byte costs where more do: what queues drop is sent again, late
COPIES = 1.2  # what two hops of float32 cost beside the backend's sum, which adds where the values lie
COPIES_OF_GROUPS = 1.5  # likewise, beside the backend's sum of DDP's buckets, which needs no copies into groups


def traffic(message: str, payload_bytes: int, size: int) -> int:
    """Bytes one rank puts on the wire for one message whose payload on each rank has ``payload_bytes`` bytes.

    An all-reduce of the backend goes round a ring and sends 2(P-1)/P of its payload; an all-gather sends what each rank
    contributes P-1 times; of a shift and an all-to-all the payload is what leaves.  Of a broadcast, which all but one
    rank receive once, each rank is charged a P-th: who passes it on depends on the backend.
    """
    if size == 1:
        return 0
    if message == "all_reduce":
        return 2 * (size - 1) * payload_bytes // size
    if message == "all_gather":
        return (size - 1) * payload_bytes
    if message in ("shift", "all_to_all"):
        return payload_bytes
    if message == "broadcast":
        return (size - 1) * payload_bytes // size
    raise ValueError(f"unknown message {message!r}")


def hops(message: str, size: int) -> int:
    """How often a message goes from one rank to the next, one after the other, as Gloo and we send it."""
    if message == "all_reduce":
        return 2 * (size - 1)
    return (size - 1).bit_length() if message == "broadcast" else int(size > 1)  # a broadcast goes down a binary tree


@dataclass(frozen=True)
class Link:
    """The time of a message: a latency, and time for each byte on the wire.

    Attributes:
        latency_s: of a message to all other ranks at once.
        s_per_byte: that a rank sends.
        all_reduce_s: the latency of an all-reduce of the backend.
    """

    latency_s: float
    s_per_byte: float
    all_reduce_s: float = math.nan

    def carries(self, seconds: float) -> int:
        """Bytes on the wire in ``seconds``, in steps of a fifth, so that two measurements are often alike."""
        on_the_wire = min(max(seconds / max(self.s_per_byte, 1e-12), 1), MOST_LATENCY_BYTES)
        return round(2 ** (round(4 * math.log2(on_the_wire)) / 4))

    def all_reduce_of(self, size: int) -> float:
        """The latency of an all-reduce among ``size`` ranks: that of its hops, where it was not measured."""
        return self.all_reduce_s if math.isfinite(self.all_reduce_s) else hops("all_reduce", size) * self.latency_s

    def latencies(self, size: int, on_processor: bool) -> tuple[int, int, int]:
        """What sums among ``size`` ranks go by: :attr:`Costs.latencies`; ``on_processor``: that is what trains."""
        all_reduce_s = self.all_reduce_of(size)
        long_s = max(LONG * all_reduce_s, LONG_S if on_processor else 0.0)
        payload_bytes = self.carries(long_s) * size // (2 * max(size - 1, 1))
        return self.carries(self.latency_s), self.carries(all_reduce_s), min(payload_bytes, MOST_MESSAGE_BYTES)


@dataclass(frozen=True)
class Inside:
    """The time that the ranks of a member take among themselves, to make a group the member's and to share its means.

    Attributes:
        local_size: L, ranks of a member.
        latency_s: of a group of next to no elements.
        s_per_element: of a group, all slices together.
    """

    local_size: int = 1
    latency_s: float = 0.0
    s_per_element: float = 0.0

    def seconds(self, elements: int) -> float:
        """Of a group of so many elements."""
        return self.latency_s + elements * self.s_per_element


class Costs:
    """What sums cost on a link, the same on every rank, and by that the way they take.  P = ``size``.

    Attributes:
        hop_bytes: what a link carries in the time that a message of next to no length takes to all other ranks.
        all_reduce_bytes: what it carries in that of an all-reduce of the backend of next to no length.
        message_bytes: of a message's payload, at least, after the first, where the backend sums a gradient in several.
        by_backend: float32 is always summed by the backend, which chooses among several ways itself.
    """

    def __init__(self, size: int, hop_bytes: int = HOP_BYTES) -> None:
        self.size = size
        self.latencies = hop_bytes, hops("all_reduce", size) * hop_bytes, 0
        self.by_backend = False

    @property
    def latencies(self) -> tuple[int, int, int]:
        """``hop_bytes``, ``all_reduce_bytes`` and ``message_bytes``."""
        return self.hop_bytes, self.all_reduce_bytes, self.message_bytes

    @latencies.setter
    def latencies(self, given: tuple[int, int, int]) -> None:
        self.hop_bytes, self.all_reduce_bytes, self.message_bytes = given

    def of(self, way: str, payload_bytes: int) -> float:
        """The time of a sum of ``payload_bytes`` on the wire from each rank, in bytes that a link carries meanwhile.

        Ways are "two_hops" (to who adds that slice, and back) and "backend" (round a ring).
        """
        latency_bytes = 2 * self.hop_bytes if way == "two_hops" else self.all_reduce_bytes
        return latency_bytes + 2 * (self.size - 1) / self.size * payload_bytes

    def in_one_hop(self, payload_bytes: int) -> bool:
        """Whether a sum goes to everybody, who adds, and is sooner than in two hops.

        A long one does not, since it takes room for what all send.
        """
        short = payload_bytes <= max(SEGMENT_BYTES, self.hop_bytes)
        more_bytes = (self.size - 1) * (self.size - 2) / self.size * payload_bytes  # than in two hops
        crowd = CROWD if (self.size - 1) * payload_bytes > QUEUE_BYTES else 1
        return short and crowd * more_bytes <= self.hop_bytes

    def way_of(self, payload_bytes: int, lossless: bool) -> str:
        """The way of a sum: "one_hop", or as :meth:`of` has it; ``lossless``: of float32, which the backend can add."""
        if lossless and self.by_backend:
            return "backend"
        if self.in_one_hop(payload_bytes):
            return "one_hop"
        two_hops = self.of("two_hops", payload_bytes)
        return "backend" if lossless and self.of("backend", payload_bytes) <= COPIES * two_hops else "two_hops"

    def in_place(self, payload_bytes: int) -> bool:
        """Whether the backend's sums of a gradient in float32, where DDP has it, are the soonest."""
        two_hops = self.of("two_hops", payload_bytes)
        return self.size > 1 and (self.by_backend or self.of("backend", payload_bytes) <= COPIES_OF_GROUPS * two_hops)
