"""Has each rank's Adam divide by the second moment that the mean gradient has, not by that of its own gradient."""

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.engine.replica import HALVES
from lightning_sparse.engine.second_moments import SecondMoments

STATE = "exp_avg_sq"  # where Adam and its kin keep v, with v <- beta v + (1 - beta) g^2
WITHOUT, WITH_DECAY = "without decay", "with decay"  # what g is: the gradient, or that and weight_decay * weight
PLAIN = {"fused": False, "capturable": False, "foreach": False}  # which runs on any CPU


class MeanMoments:
    """Has v, the mean of squares of Adam and its kin, be that of the mean gradient.

    s, the part of its squares that the mean gradient has, is known of each element (:class:`SecondMoments`).  Before a
    step of the optimizer, in which it sets ``v <- beta v + (1 - beta) g^2``,

        v  <-  s / s_before * v - (1 - beta) / beta * (1 - s) * g^2

    so that v is, after each step, s times what the rank's own would be.  Between the two it may be negative.  A v from
    before local steps is that of the mean gradient already.  Optimizers that keep no such v are left alone.
    """

    def __init__(self, moments: SecondMoments) -> None:
        self._moments = moments
        self._own = torch.ones_like(moments.squares)  # by which nothing was lowered
        self._kinds: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        #: The squares [2, m] by which v of a parameter was lowered; None: it is of the mean gradient as it is.
        self._by: dict[Tensor, Tensor | None] = {}
        self._stepping: dict[Tensor, weakref.ref[Optimizer]] = {}  # whose v is ready for a step

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> None:
        """Look at the gradients that ``optimizer`` is about to use, and lower its v."""
        if optimizer not in self._kinds:
            self._kinds[optimizer] = squares_of(optimizer)
        kind = self._kinds[optimizer]
        for group, p in _with_gradients(optimizer):
            if not kind or p not in self._moments:
                continue
            gradient = _squared(optimizer, group, p, kind)
            self._moments.look(p, gradient)
            v = optimizer.state[p].get(STATE) if p in optimizer.state else None
            if v is not None and type(v) is not Tensor:  # in 8 bits, say: it stays this rank's own
                continue
            if v is None or (p not in self._by and not bool(v.any())):  # it begins as this rank's own, or is to begin
                self._by[p] = self._own
            elif p in self._stepping:  # a closure is asked once more, or a step has raised: another gradient may come
                v.clamp_(min=0.0)
            else:
                by = self._by.setdefault(p, None)
                if self._moments.is_known:
                    self._lower(v, p, by, gradient, optimizer, float(group["betas"][1]))
                    self._by[p] = self._moments.squares
                self._stepping[p] = weakref.ref(optimizer)

    def _lower(
        self, v: Tensor, p: Tensor, by: Tensor | None, gradient: Tensor, optimizer: Optimizer, beta: float
    ) -> None:
        squares, skipped = self._moments.squares, getattr(optimizer, "found_inf", None)
        for block in self._moments.blocks(p):
            share, part, g = self._moments.share(p, squares, block), v[block], gradient[block].float()
            if by is not None and by is not squares:
                part.mul_(share / self._moments.share(p, by, block))
            if isinstance(skipped, Tensor):  # by a gradient scaler
                g = torch.where(skipped > 0, 0.0, g)
            part.addcmul_((share - 1) * g, g, value=(1 - beta) / beta)
        if v.dtype in HALVES:  # which may round v away from what the step adds
            v.clamp_(min=0.0)

    def after_update(self, optimizer: Optimizer) -> None:
        self._stepping = {p: by for p, by in self._stepping.items() if by() not in (optimizer, None)}

    @property
    def sampled(self) -> Tensor | None:
        """This rank's own [3, m]: the sketch that is to be compared, and the squares by which its v was lowered."""
        sketch = self._moments.sampled
        return None if sketch is None else torch.cat([sketch[None], self._lowered_by])

    @property
    def _lowered_by(self) -> Tensor:
        return self._moments.gathered({p: by for p, by in self._by.items() if by is not None})

    def state(self) -> dict[str, Tensor]:
        return {**self._moments.state(), "lowered by": self._lowered_by}

    def resume(self, state: Mapping[str, Tensor], sampled: Tensor | None, size: int) -> None:
        """Go on from a checkpoint of ``size`` ranks; if it is of other parameters, what v is counts as the mean's.

        ``sampled`` is of this rank, which may have left out a step that others took; None where there is none.
        """
        self._by = {}
        sketch, by = (sampled[0], sampled[1:]) if sampled is not None and sampled.dim() > 1 else (sampled, None)
        if self._moments.resume(state, sketch, size):
            by = (state["lowered by"] if by is None else by).to(self._moments.squares.device)
            same = torch.equal(by, self._moments.squares)
            self._by = {p: self._moments.squares if same else by for p in self._moments if self._moments.has(p, by)}


def squares_of(optimizer: Optimizer) -> str:
    """Return of what ``optimizer`` keeps a mean of squares in the way of Adam; empty if it does not.

    Another one of its class and settings takes two steps with one parameter, on the CPU.
    """
    settings = {**optimizer.defaults, **PLAIN, "weight_decay": 0.5, "lr": 0.1}
    known = inspect.signature(type(optimizer)).parameters
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
    try:
        with torch.device("cpu"):  # on which the optimizer makes its state, whatever the default
            other = type(optimizer)([weight], **{key: x for key, x in settings.items() if key in known})
            beta, expected = float(other.param_groups[0]["betas"][1]), {WITHOUT: 0.0, WITH_DECAY: 0.0}
            for gradient in (1.0, -3.0):
                weight.grad = torch.tensor([gradient], dtype=torch.float32, device="cpu")
                for kind in expected:
                    g = _squared(other, other.param_groups[0], weight, kind)
                    expected[kind] = beta * expected[kind] + (1 - beta) * float(g) ** 2
                other.step()
            v = float(other.state[weight][STATE])
    except Exception:  # whatever else it needs, it is not Adam
        return ""
    return next((kind for kind, x in expected.items() if abs(v - x) < 1e-4 * x), "")


def _with_gradients(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        yield from ((group, p) for p in group["params"] if p.grad is not None)


def _squared(optimizer: Optimizer, group: dict[str, Any], p: Tensor, kind: str) -> Tensor:
    """What ``optimizer`` is about to square of ``p``: a gradient scaler may leave it to a fused one to unscale."""
    assert p.grad is not None
    gradient, scale = p.grad.detach(), getattr(optimizer, "grad_scale", None)
    if isinstance(scale, Tensor):
        gradient = gradient.float() / scale
    if kind == WITH_DECAY and group["weight_decay"]:
        return (-gradient if group.get("maximize") else gradient).add(p.detach(), alpha=group["weight_decay"])
    return gradient
