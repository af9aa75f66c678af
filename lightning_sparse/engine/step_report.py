"""What one step of one rank cost and did."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.lane import Lane
from lightning_sparse.network.comm import traffic


@dataclass(frozen=True)
class Report:
    """What one step of one rank cost and did."""

    sent_bytes: int
    dense_bytes: int  # what a float32 ring all-reduce of the same gradient sends
    elements: int
    picked: int | Tensor  # distinct elements updated; a tensor is not read until it is logged
    target: int
    mask_bytes: int  # of the bytes sent, those that only said which elements travel
    overflow: int | Tensor  # elements this rank meant to send but kept, for want of room in a message; likewise
    ms_compress: float  # in the compressor's own code
    ms_network: float  # of the issuing thread, waiting for messages
    ms_wait: float  # of training: from the last gradient handed over to the last mean handed back

    @classmethod
    def of(cls, groups: Sequence[Group], lanes: Sequence[Lane], waited_ns: int) -> "Report":
        """The step that ``lanes`` have just ended."""
        elements = sum(group.n for group in groups)
        return cls(
            sent_bytes=sum(lane.sent_bytes() for lane in lanes),
            dense_bytes=traffic("all_reduce", 4 * elements, lanes[0].comm.size),
            elements=elements,
            picked=sum(group.picked for group in groups),
            target=sum(group.target for group in groups),
            mask_bytes=sum(group.mask_bytes for group in groups),
            overflow=sum(group.overflow for group in groups),
            ms_compress=sum(lane.compress_ns for lane in lanes) / 1e6,
            ms_network=sum(lane.network_ns for lane in lanes) / 1e6,
            ms_wait=waited_ns / 1e6,
        )

    def saves_bytes(self) -> bool:
        """Whether fewer bytes were sent than dense DDP would have sent; also where there was nobody to send to."""
        return self.sent_bytes < self.dense_bytes or not self.dense_bytes
