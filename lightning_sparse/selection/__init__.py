"""How the elements that travel are chosen, and sparse vectors."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.selection import device, host
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import MessageLayout, Selection


class Backend(Protocol):
    """What the modules :mod:`~lightning_sparse.selection.host` and :mod:`~lightning_sparse.selection.device` both do.

    A :class:`Selection` is made, packed, read and used by the same one of them.
    """

    def layout(self, n: int, capacity: int, indices: str, dtype: torch.dtype | None = None) -> MessageLayout:
        """Messages of at most ``capacity`` of ``n`` elements; ``indices`` names how indices travel."""

    def select(self, x: Tensor, threshold: float | Tensor, capacity: int) -> Selection:
        """The elements of ``x`` [n] that reach ``threshold``, the ``capacity`` largest if there are more.

        Zeros never reach a threshold, NaN does.  A threshold of NaN is reached by all others; but on a device, if it is
        a tensor, only by what is not finite.
        """

    def select_k(self, x: Tensor, k: int) -> Selection:
        """The ``k`` elements of ``x`` [n] with the largest magnitudes, with their values; on a device about those."""

    def with_values(self, selection: Selection, x: Tensor) -> Selection:
        """``selection`` of ``x`` [n], with the values there."""

    def put(self, selection: Selection, into: Tensor) -> None:
        """Set the selected elements of ``into`` [n] to the values of ``selection``."""

    def add(self, selection: Selection, into: Tensor) -> None:
        """Add the values of ``selection`` to the selected elements of ``into`` [n]."""

    def pack(self, layout: MessageLayout, selection: Selection, out: Tensor) -> Tensor:
        """Write a message to ``out`` [nbytes] uint8, which is returned; the values keep the rounding errors."""

    def unpack(self, layout: MessageLayout, payloads: Tensor, widths: Sequence[int] = ()) -> list[Selection]:
        """Read the messages ``payloads`` [P, nbytes] uint8, of vectors of ``widths`` [P] elements, at most layout.n.

        The host raises a CorruptMessage where one is damaged, a device reports it in ``intact``.
        """

    def moved(self, selection: Selection, start: int, stop: int, n: int) -> Selection:
        """``selection`` of the part [``start``, ``stop``) of [0, n), counted from its start, as one of the whole."""

    def join(self, parts: Sequence[Selection], edges: Sequence[int]) -> Selection:
        """One selection of selections of the parts of [0, n) between ``edges``; ``near`` is 0."""

    def compact(self, selection: Selection, most: int) -> Selection:
        """``selection``, without values, in rising order; on a device the first ``most`` of it."""

    def unite(self, selections: Sequence[Selection], n: int) -> Selection:
        """The elements of [0, n) that are in any of ``selections``, without values."""

    def among(self, selection: Selection, index: Tensor, n: int) -> Selection:
        """What of ``selection`` of [0, n), with its values, is in ``index`` too, which another selection holds."""

    def total(self, selection: Selection, n: int) -> Tensor | Sparse:
        """The vector [n] that is zero but for what is selected."""

    def add_up(self, selections: Sequence[Selection], n: int) -> tuple[Tensor | Sparse, int | Tensor]:
        """The sum of ``selections`` of [0, n), added in their order, and how many elements are in any of them."""


def on(x: Tensor) -> Backend:
    """The backend for ``x``."""
    return device if kernels.used_for(x) else host
