"""Has each rank's Adam divide by the second moment of the mean gradient, not by that of its own gradient.

What part of the squares of one rank's gradient the mean gradient has is found by row and column, from small sketches.

Adam divides by the root of a mean of squares.  A rank's gradient is the mean gradient and the noise of one rank, so
its squares are up to P times as large as the mean's, more in some rows and columns of a matrix than in others.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.inside import share
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.local_steps.optimizers import PLAIN
from lightning_sparse.local_steps.replica import HALVES
from lightning_sparse.network.comm import Comm, Rounds, completed, without_autocast
from lightning_sparse.network.cut import WHOLE, shard_of
from lightning_sparse.network.sums import sum_values
from lightning_sparse.selection.streams import draw
from lightning_sparse.wire import BFLOAT16

EVERY = 10  # steps from one look at the gradients to the next
EARLY = 20  # looks, the first ones, that follow each other in every step
RARELY = 10 * EVERY  # steps from one to the next where all that ranks had to compare was zero
MARK = 1e-37  # in the place of a sketch that is zero, of a parameter whose gradient was looked at; its square is 0
DECAY = 0.95  # of means over looks, once there were 20
LONGEST = 65_536  # elements of a vector that has a square for each; a longer one has one square for all
BLOCK = 2**17  # elements that a CPU works on at once
SEED = 2018  # of the signs

STATE = "exp_avg_sq"  # where Adam and its kin keep v, with v <- beta v + (1 - beta) g^2
WITHOUT, WITH_DECAY = "without decay", "with decay"  # what g is: the gradient, or that and weight_decay * weight

Block = slice | EllipsisType  # of rows, or all


class _Place:
    """Where the sketch of a parameter lies among all, [m]: of a matrix a number for each row, then for each column."""

    def __init__(self, parameter: Tensor, start: int) -> None:
        n, rows = parameter.numel(), parameter.shape[0] if parameter.dim() else 1
        self.is_matrix = 1 < rows < n
        self.shape = parameter.shape
        self.is_long = not self.is_matrix and n > LONGEST
        middle = start + (rows if self.is_matrix else 1 if self.is_long else n)
        self.rows = slice(start, middle)
        self.columns = slice(middle, middle + (n // rows if self.is_matrix else 0))
        self.all = slice(start, self.columns.stop)

    def sketch(self, gradient: Tensor, signs: Tensor, out: Tensor) -> None:
        """Set ``out`` [m] here to sums of ``gradient`` with random ``signs`` [m] along rows and along columns."""
        if self.is_matrix:
            matrix = gradient.reshape(len(gradient), -1).float()
            out[self.rows] = matrix @ signs[self.columns]
            out[self.columns] = signs[self.rows] @ matrix
        else:
            vector = gradient.reshape(-1).float()
            out[self.rows] = vector.mean() if self.is_long else vector

    def share(self, parts: Tensor, least: float, block: Block = ...) -> Tensor:
        """The part of each element, of the parameter's shape, from ``least`` to 1; for a long vector one, [1].

        Args:
            parts: [m], of each number of the sketch, as :meth:`SecondMoments.parts` returns them.
            least: 1/P, what is left of noise.
            block: of the rows.
        """
        rows = parts[self.rows]
        if not self.is_matrix:
            return rows if self.is_long else rows.view(self.shape)
        return torch.outer(rows[block], parts[self.columns]).clamp_(least, 1.0).view(-1, *self.shape[1:])

    def blocks(self) -> Iterator[Block]:
        """Cut the rows of a matrix into blocks that a CPU works on in its cache."""
        step = max(1, BLOCK // max(self.columns.stop - self.columns.start, 1))
        yield from (slice(row, row + step) for row in range(0, self.shape[0], step)) if self.is_matrix else (...,)


class SecondMoments:
    """Compares the squares of the mean gradient with those of the ranks' gradients, now and then.

    At a look each rank sums its gradient of a matrix [r, c] along rows and along columns with random signs, the same on
    all ranks.  The expected square of such a sum is the sum of the squares, also that of the mean over the ranks.  So
    r + c sums and their squares tell of each row and column what part of its squares the mean gradient has.  That of an
    element is that of its row times that of its column over that of the matrix, as Adafactor factors second moments
    (Shazeer and Stern, ICML 2018, section 3).  Vectors are compared element by element.

    Args:
        groups: of the parameters.  Of those that FSDP2 shards each rank looks at its shard alone.

    Attributes:
        squares: means over looks, the same on every rank: of the mean gradient's sketch and of the ranks', [2, m].
        looks: that have been begun.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._places: dict[Tensor, _Place] = {}
        self._cut = next((group.cut for group in groups), WHOLE)  # the ranks of a member compare a part each
        end = 0
        named = sorted(item for group in groups for item in zip(group.names, group.parameters, strict=True))
        for parameter in (p for _, p in named if shard_of(p).numel()):  # in an order that no grouping changes
            self._places[parameter] = _Place(shard_of(parameter), end)
            end = self._places[parameter].all.stop
        self._device = next(iter(self._places)).device if self._places else torch.device("cpu")
        self.squares = torch.zeros(2, end, dtype=torch.float32, device=self._device)
        self.looks = 0
        self._compared = 0  # looks whose sums are in ``squares``
        self._least = 1.0  # 1/P, once ranks have been compared
        self._signs: Tensor | None = None  # [m], of the look that is being made ready
        self._sketch: Tensor | None = None  # [m], of this rank's gradients for that look
        self._seen: set[Tensor] = set()  # parameters whose gradients are in it
        self._sent: Tensor | None = None  # [m], what is being compared
        self._sums: Tensor | None = None  # [2, m] over the ranks, once they have arrived
        self._received: Tensor | None = None  # these, until they are read
        self._parts = WeakTensorKeyDictionary()  # of squares that somebody goes by: launched once, not for each step

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._places

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._places)

    @without_autocast()
    def look(self, parameter: Tensor, gradient: Tensor) -> None:
        """Sketch the first gradient of ``parameter`` since the last look."""
        if parameter in self._seen:
            return
        if self._signs is None:
            generator = torch.Generator(self._device).manual_seed(draw(SEED, self.looks))
            shape = self.squares.shape[1:]
            self._signs = torch.randint(0, 2, shape, generator=generator, device=self._device).float() * 2 - 1
        if self._sketch is None:
            self._sketch = torch.zeros_like(self._signs)
        self._seen.add(parameter)
        self._places[parameter].sketch(gradient, self._signs, self._sketch)

    @property
    def is_known(self) -> bool:
        """Whether ranks have been compared."""
        return self._compared > 0

    def share(self, parameter: Tensor, squares: Tensor, block: Block = ...) -> Tensor:
        """What part of its squares the mean gradient has by these ``squares``, to be broadcast to its shape."""
        return self._places[parameter].share(self.parts(squares), self._least, block)

    def blocks(self, parameter: Tensor) -> Iterator[Block]:
        """What of ``parameter`` is best worked on at once: blocks of its first dimension, or all of it."""
        return iter((...,)) if self._device.type != "cpu" else self._places[parameter].blocks()

    def parts(self, squares: Tensor) -> Tensor:
        """Of each number of the sketch [m] the first of ``squares`` [2, m] over the second; of columns relatively.

        That of a column is taken over that of its matrix, so that it is multiplied by that of a row.
        """
        if squares not in self._parts:
            parts = _part(squares, self._least)
            matrices = [place for place in self._places.values() if place.is_matrix]
            if matrices:
                whole = _part(torch.stack([squares[:, each.rows].sum(1) for each in matrices], 1), self._least)
                for i, each in enumerate(matrices):
                    parts[each.columns] /= whole[i]
            self._parts[squares] = parts
        found: Tensor = self._parts[squares]
        return found

    @property
    def lr_factor(self) -> Tensor:
        """By how much shorter a step is that divides by the root of a rank's squares, from 1 to the root of P."""
        sizes = {p: shard_of(p).numel() for p in self._places}
        shares = [self.share(p, self.squares).mean() * n for p, n in sizes.items()]
        return (torch.stack(shares).sum() / sum(sizes.values())).rsqrt()

    # - the ranks' messages

    @property
    def is_starting(self) -> bool:
        """Whether ranks still compare after every step."""
        return bool(self._places) and self.looks < EARLY

    def is_due(self, step: int) -> bool:
        """Whether ranks compare after ``step``: hardly ever where no optimizer of any rank divides by such."""
        if not self._places or self.is_starting:
            return self.is_starting
        return step % RARELY == 0 or (step % EVERY == 0 and bool(self.squares[1].any()))

    @property
    def sampled(self) -> Tensor | None:
        """This rank's sketch [m] that is to be compared, or is being compared; zeros if none is, None of nothing."""
        sketch = self._sketch if self._sent is None else self._sent
        if sketch is None or self._sent is not None:
            return torch.zeros_like(self.squares[0]) if sketch is None and self._places else sketch
        marked = sketch.clone()
        for place in (self._places[p].all for p in self._seen):
            if not bool(marked[place].any()):
                marked[place.start] = MARK
        return marked

    def snapshot(self) -> None:
        """Have ready what :meth:`sum_up` sends."""
        sketch = torch.zeros_like(self.squares[0]) if self._sketch is None else self._sketch
        self._sent, self._sketch, self._signs = sketch.nan_to_num(0.0, 0.0, 0.0), None, None
        self._seen.clear()
        self.looks += 1

    def sum_up(self, comm: Comm) -> Rounds:
        """Compare the ranks' gradients in bfloat16; to be run to its end, on every rank; returns sums [2 m]."""
        assert self._sent is not None
        sums = torch.cat([self._sent, self._sent.square()])
        own = self._cut.own(sums)
        if own.numel():
            own.copy_((yield from sum_values(own, comm.in_format(BFLOAT16))))
        self._sums = sums.view(2, -1)
        return self._sums

    def compare(self, lane: Lane) -> None:
        """Run :meth:`sum_up` on ``lane``."""
        lane.run(self.sum_up(lane.comm))

    def receive(self, inside: Comm | None = None) -> None:
        """Note that what was launched has arrived, on all ranks; those ``inside`` a member have a slice of it each."""
        if inside is not None and self._sums is not None:
            completed(share([self._sums.view(-1)], self._cut, inside))
        self._received, self._sums = self._sums, None

    def drop(self) -> None:
        """Forget the look that is under way, as if it had not been taken up; on every rank."""
        self.looks -= self._sent is not None
        self._sent = self._sums = self._received = None

    def read(self, size: int) -> None:
        """Go by what was received of ``size`` ranks from now on, if anything was since the last time."""
        if self._received is None:
            return
        mean, square = self._received / size
        self._least, self._compared = 1 / size, self._compared + 1
        decay = min(DECAY, 1 - 1 / self._compared)
        self.squares = self.squares * decay + torch.stack([mean.square(), square]) * (1 - decay)
        self._received = self._sent = None

    # - checkpoints

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, the same on every rank; a look under way will be begun again."""
        return {"squares": self.squares, "looks": torch.tensor(self._compared, dtype=torch.int64, device="cpu")}

    def resume(self, state: Mapping[str, Tensor], sampled: Tensor | None, size: int) -> bool:
        """Go on from a checkpoint of ``size`` ranks; returns whether it is of these parameters: else it begins anew."""
        fits = state["squares"].shape == self.squares.shape
        self.squares = state["squares"].to(self._device, copy=True) if fits else torch.zeros_like(self.squares)
        self.looks = self._compared = int(state["looks"]) if fits else 0
        self._least, self._sent, self._sums, self._received, self._signs = 1 / size, None, None, None, None
        self._parts.clear()
        sampled = sampled if fits else None
        self._sketch = None if sampled is None else sampled.to(self._device, copy=True)
        self._seen = {p for p, place in self._places.items() if sampled is not None and bool(sampled[place.all].any())}
        return fits

    def gathered(self, parts: Mapping[Tensor, Tensor]) -> Tensor:
        """Put ``parts`` [2, m] of each parameter, of its own place in them, into one [2, m]; NaN of all others."""
        found = torch.full_like(self.squares, float("nan"))
        for parameter, part in parts.items():
            found[:, self._places[parameter].all] = part[:, self._places[parameter].all]
        return found

    def has(self, parameter: Tensor, squares: Tensor) -> bool:
        """Whether ``squares``, as :meth:`gathered` returned them, are of this parameter too."""
        return not bool(squares[:, self._places[parameter].all].isnan().any())


def _part(squares: Tensor, least: float) -> Tensor:
    """The first of ``squares`` [2, *s] over the second; 1 where nothing is known."""
    of_mean, of_ranks = squares
    return torch.where(of_ranks > 0, of_mean / of_ranks, 1.0).nan_to_num(1.0).clamp(least, 1.0)


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
            v = shard_of(optimizer.state[p].get(STATE)) if p in optimizer.state else None
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
    gradient, scale = shard_of(p.grad.detach()), getattr(optimizer, "grad_scale", None)
    if isinstance(scale, Tensor):
        gradient = gradient.float() / scale
    if kind == WITH_DECAY and group["weight_decay"]:
        return (-gradient if group.get("maximize") else gradient).add(shard_of(p.detach()), alpha=group["weight_decay"])
    return gradient
