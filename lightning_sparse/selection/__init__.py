"""How the elements that are sent are chosen, and sparse vectors."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.selection import device, host
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import MessageLayout, Selection


class Backend(Protocol):
    """The functions that the modules ``host`` and ``device`` both have."""

    layout: Callable[..., MessageLayout]
    select: Callable[[Tensor, float | Tensor, int], Selection]
    select_k: Callable[[Tensor, int], Selection]
    with_values: Callable[[Selection, Tensor], Selection]
    select_from: Callable[..., Selection]
    put: Callable[[Selection, Tensor], None]
    add: Callable[[Selection, Tensor], None]
    pack: Callable[[MessageLayout, Selection, Tensor], Tensor]
    unpack: Callable[..., list[Selection]]
    moved: Callable[[Selection, int, int, int], Selection]
    join: Callable[[list[Selection], list[int]], Selection]
    compact: Callable[[Selection, int], Selection]
    among: Callable[[Selection, Tensor, int], Selection]
    unite: Callable[[list[Selection], int], Selection]
    total: Callable[[Selection, int], Tensor | Sparse]
    add_up: Callable[[list[Selection], int], tuple[Tensor | Sparse, int | Tensor]]


def on(x: Tensor) -> Backend:
    """The module that selects from ``x``."""
    return device if kernels.used_for(x) else host
