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
    placed: Callable[[Tensor, Tensor], Tensor]
    select: Callable[..., Selection]
    select_k: Callable[[Tensor, int], Selection]
    with_values: Callable[[Selection, Tensor], Selection]
    select_from: Callable[..., Selection]
    part: Callable[[Selection, int], Selection]
    put: Callable[[Selection, Tensor], None]
    add: Callable[[Selection, Tensor], None]
    pack: Callable[..., Tensor]
    unpack: Callable[..., Selection]
    led_by: Callable[[Selection, int, Selection], Selection]
    as_one: Callable[[Selection], Selection]
    join: Callable[[list[Selection], list[int]], Selection]
    compact: Callable[[Selection, int], Selection]
    among: Callable[[Selection, Selection, int], Selection]
    unite: Callable[[Selection, int], Selection]
    total: Callable[[Selection, int], Tensor | Sparse]
    add_up: Callable[[Selection, int], tuple[Tensor | Sparse, int | Tensor]]


def on(x: Tensor) -> Backend:
    """The module that selects from ``x``."""
    return device if kernels.used_for(x) else host
