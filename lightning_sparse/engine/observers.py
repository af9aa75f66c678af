"""What somebody watches of what is unsent: how long it waits, what a step delivers, and the last gradients."""

import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group
from lightning_sparse.selection.streams import draw

MOST = 64  # elements sampled of a parameter: what starves of 5 % of it is missed in 4 of 100 parameters
DECAY_OF_GRADIENTS = 0.99  # of a mean over about 100 steps
DECAY_OF_TURNS = 0.9  # over about 10, so that dense steps of a warm-up are soon forgotten
LEAST = 0.01  # of a mean of how often an element was sent: that it was within about 40 steps
ROWS = 6  # numbers that are kept of a sampled element
STARVING = 5  # turns; an element that has waited longer starves
STEPS = 8  # whose gradients a record keeps
RUN = 256  # neighbours that a record takes together


@dataclass(frozen=True)
class Waiting:
    """What is unsent of one parameter on this rank, judged by a sample of its elements.

    An element waits from the first step that leaves some of its gradient unsent until the next step that sends it.
    """

    name: str  # of the parameter
    elements: int  # that it has
    oldest: int  # steps that the sampled element that waits longest has waited; 0 where nothing is unsent
    #: Euclidean norm of what is unsent over that of this rank's gradient, a mean over about 100 steps; 0 where nothing
    #: is unsent, inf where its gradient has been zero throughout.
    unsent_over_gradient: float
    turn: float  # steps from one sending of an element to the next, the mean over all parameters and about 10 steps
    starving: float  # fraction of the elements that have waited for more than ``STARVING * turn`` steps


class Sample:
    """Elements of ``unsent`` that are looked at in every step: at most ``MOST`` of each parameter, for ever the same.

    That an element was sent shows in ``unsent``: a compressor takes out what it sends, and touches nothing else.  So
    each element is read twice a step, before and after, and nobody waits for the device.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._steps = 0
        self._sizes: dict[str, int] = {}  # elements of each parameter, in the order in which they are sampled
        device = groups[0].unsent.device if groups else torch.device("cpu")
        # Rows, for each sampled element: what is unsent; the last step that sent it or left nothing to send; the mean
        # over steps of whether it was sent; that of its gradient's square; squares that wait; the last step it was due.
        self._state = torch.zeros(ROWS, 0, dtype=torch.float32, device=device)
        decays = [[DECAY_OF_TURNS], [DECAY_OF_GRADIENTS]]
        self._decays = torch.tensor(decays, dtype=torch.float32, device=device)
        self.lay_out(groups)

    def lay_out(self, groups: Sequence[Group]) -> None:
        """Go on with the same parameters in other groups.  To be called between two steps."""
        known = dict(zip(self._sizes, self._state.split(self._counts(), dim=1), strict=True))
        self._groups = groups
        self._sizes = {name: n for group in groups for name, n in zip(group.names, group.sizes, strict=True)}
        new = ((name, self._state.new_zeros(ROWS, min(n, MOST))) for name, n in self._sizes.items())
        self._state = torch.cat([self._state[:, :0], *(known.get(*each) for each in new)], dim=1)  # [ROWS, m]
        self._places = [_places(group).to(self._state.device) for group in groups]  # in each group's unsent
        self._before, self._left = torch.zeros_like(self._state[:2])  # [m], unsent before a step's messages, and after
        counts = [places.numel() for places in self._places]
        self._before_of, self._left_of = self._before.split(counts), self._left.split(counts)  # each group's part
        self._read()
        self._state[0] = self._left
        self._delivered = torch.zeros_like(self._left)  # [m], in the last step
        self._elements = torch.cat(  # [m], for how many elements each stands
            [self._left.new_full((min(n, MOST),), n / max(min(n, MOST), 1)) for n in self._sizes.values()]
            or [self._left]
        )

    def before(self, group: Group) -> None:
        """Note what is unsent of ``group`` before this step's messages, its gradient included."""
        torch.index_select(group.unsent, 0, self._places[group.index], out=self._before_of[group.index])

    def restored(self, group: Group) -> None:
        """Note that what is unsent of ``group`` was set to what it had been."""
        self._state[0].split([places.numel() for places in self._places])[group.index].copy_(
            group.unsent[self._places[group.index]]
        )

    def end_step(self) -> None:
        """Note what is left of it."""
        self._steps += 1
        earlier, cleared, sent, squares, waiting, turn = self._state
        self._read()
        unsent = self._left
        # A parameter that was not used in this step had nothing to send while others were sent, and has again now.
        before = torch.where(self._before == 0, unsent, self._before)
        gradient, went = (before - earlier).nan_to_num_(0.0, 0.0, 0.0), unsent != before
        self._delivered = before - unsent
        self._state[2:4] *= self._decays
        sent += went
        squares.addcmul_(gradient, gradient)
        waiting.addcmul_(gradient, gradient).mul_(part_left(before, unsent))
        turn.masked_fill_(self._before != 0, self._steps)
        cleared.masked_fill_(went.logical_or_(unsent == 0), self._steps)
        self._state[0] = unsent
        self._before.zero_()  # of groups that are not sent in the next step

    def end_dense_step(self) -> None:
        """Note a step that delivered all that was unsent, before anybody could look at it."""
        self._steps += 1
        unsent, cleared, sent, _, waiting, turn = self._state
        for zero in (unsent, waiting, self._left, self._delivered):
            zero.zero_()
        sent.mul_(DECAY_OF_TURNS).add_(1)
        cleared.fill_(self._steps)
        turn.fill_(self._steps)

    def waiting(self) -> list[Waiting]:
        """Return what is unsent after the last step of each parameter that has elements.  Waits for the device."""
        parts = self._state.cpu().split(self._counts(), dim=1)
        found = [(name, n, part) for (name, n), part in zip(self._sizes.items(), parts, strict=True) if n]
        turn = self._turn([(n, part) for _, n, part in found])
        return [self._waiting(name, n, part, turn) for name, n, part in found]

    def unsent_and_left(self, left_of: Callable[[Group, Tensor], Tensor]) -> Tensor:
        """What was unsent before the last step's messages, and is left of it: [2, m], whose squared sums are estimates.

        ``left_of`` returns what is unsent of a group now, all of it, at some places.
        """
        groups = zip(self._groups, self._places, strict=True)
        left = torch.cat([self._left[:0], *(left_of(group, places) for group, places in groups)])
        return torch.stack([left + self._delivered, left]) * self._elements.sqrt()

    def waits_and_arrives(self) -> tuple[float, float]:
        """What waits of this rank's gradients, and what arrives of them in a step.

        By Little's law the first over the second is how many steps late one arrives.  An element waits with the square
        of its gradient as weight, in the proportion that is left of it.  Waits for the device.
        """
        *_, squares, waiting, turn = self._state
        arriving = squares / _weight(DECAY_OF_GRADIENTS, self._steps)
        between_turns = arriving * (self._steps - turn)  # what local steps have not sent until their turn
        waits = (waiting + between_turns) * self._elements
        return float(waits.sum()), float((arriving * self._elements).sum())

    def _turn(self, parts: Sequence[tuple[int, Tensor]]) -> float:
        """Steps from one sending of an element to the next, the mean over those that are sent or wait."""
        sent = busy = 0.0
        for n, (unsent, _, often, *_) in parts:
            sent += n * float(often.mean()) / _weight(DECAY_OF_TURNS, self._steps)
            busy += n * float(((unsent != 0) | (often > LEAST)).float().mean())
        return busy / sent if sent else math.inf

    def _waiting(self, name: str, n: int, part: Tensor, turn: float) -> Waiting:
        unsent, cleared, _, squares = part[:4]
        waited = torch.where(unsent == 0, 0, self._steps - cleared)
        norm = float(unsent.norm())
        gradient = math.sqrt(float(squares.sum()) / _weight(DECAY_OF_GRADIENTS, self._steps))
        ratio = norm / gradient if gradient else math.inf
        starving = float((waited > STARVING * turn).float().mean())
        return Waiting(name, n, int(waited.max()), ratio if norm else 0.0, turn, starving)

    def _counts(self) -> list[int]:
        """Sampled elements of each parameter."""
        return [min(n, MOST) for n in self._sizes.values()]

    def _read(self) -> None:
        for group, places, left in zip(self._groups, self._places, self._left_of, strict=True):
            torch.index_select(group.unsent, 0, places, out=left)


def _weight(decay: float, steps: int) -> float:
    """The weight of all ``steps`` in a sum in which each counts ``decay`` times as much as the next; 1 before any."""
    return (1 - decay**steps) / (1 - decay) if steps else 1.0


def _places(group: Group) -> Tensor:
    """Indices of the sampled elements in ``group.unsent``: [m] int64, rising, spread evenly over each parameter."""
    starts = [0, *itertools.accumulate(group.sizes)]
    found = [start + spread_over(name, n) for name, n, start in zip(group.names, group.sizes, starts, strict=False)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")


def spread_over(name: str, n: int) -> Tensor:
    """Indices of one of each of as many equal stretches of ``n`` elements, the same wherever the name is the same."""
    k = min(n, MOST)
    edges = torch.arange(k + 1, device="cpu") * n // max(k, 1)
    generator = torch.Generator("cpu").manual_seed(draw(zlib.crc32(name.encode())))
    within = torch.rand(k, generator=generator, dtype=torch.float64, device="cpu")
    return edges[:-1] + (within * edges.diff()).long()


class GradientRecord:
    """The gradients of the last steps at ``elements`` spread evenly over all groups, which must stay as they are.

    Each group that is not empty gives at least one.
    """

    def __init__(self, groups: Sequence[Group], elements: int) -> None:
        n = sum(group.n for group in groups)
        self._groups = groups
        self._places = [
            _spread(group.n, -(-elements * group.n // max(n, 1))).to(group.unsent.device) for group in groups
        ]
        self._unsent: list[Tensor | None] = [None] * len(groups)
        self._left = self._read()
        self._steps: deque[Tensor] = deque(maxlen=STEPS)

    def before(self, group: Group) -> None:
        """Note what is unsent of ``group`` before this step's messages, its gradient included."""
        self._unsent[group.index] = group.unsent[self._places[group.index]]

    def restored(self, group: Group) -> None:
        """Note that what is unsent of ``group`` was set to what it had been."""
        self._left[group.index] = group.unsent[self._places[group.index]]

    def end_step(self) -> None:
        """Note what is left of it."""
        left = self._read()
        unsent = [x if x is not None else y for x, y in zip(self._unsent, left, strict=True)]
        self._steps.append(torch.cat([now - before for now, before in zip(unsent, self._left, strict=True)]))
        self._left, self._unsent = left, [None] * len(self._groups)

    def gradients(self) -> Tensor:
        """The gradients, [T, m]; one of zeros if there was none."""
        return torch.stack(list(self._steps) or [torch.cat(self._left).zero_()]).nan_to_num_(0.0, 0.0, 0.0)

    def weights(self) -> Tensor:
        """The parameters' values at the same elements, [m]."""
        flat = [torch.cat([p.detach().reshape(-1) for p in group.parts]).float() for group in self._groups]
        return torch.cat([x[places] for x, places in zip(flat, self._places, strict=True)])

    def _read(self) -> list[Tensor]:
        return [group.unsent[places] for group, places in zip(self._groups, self._places, strict=True)]


def _spread(n: int, elements: int) -> Tensor:
    """Indices of about ``elements`` of ``n``: runs of neighbours, which share a scale, evenly spread."""
    runs = max(1, min(elements, n) // RUN)
    starts, within = (torch.arange(count, device="cpu") for count in (runs, min(RUN, elements, n)))
    return ((starts * n // runs)[:, None] + within).flatten().clamp_(max=max(n - 1, 0))[: n or 0]


def delivered(unsent: float, left: float) -> float:
    """Return the part that a step delivers, of the squared norms of what is ``unsent`` before it and ``left`` after."""
    return 1 - left / unsent if unsent else 1.0


def part_left(unsent: Tensor, left: Tensor) -> Tensor:
    """Return of each element, [m], the part of what was ``unsent`` before a step that is ``left`` after it."""
    return (left / unsent).abs_().nan_to_num_(0.0, 1.0).clamp_(max=1.0)


class CompressionError:
    """What a strategy delivers and after how many steps, judged by the same m elements in every step.

    Before a step's messages what a rank has not sent and the gradient of the step are ``unsent``; after them ``left``
    is.  With local steps these are x_r - x̄ after the optimizer's step, and after what was exchanged has been applied.
    Only sums over the ranks count: what cancels between ranks is nothing that the mean lacks.

    Squares weigh: large elements count most.  The staleness is by Little's law: what has arrived waits with its square
    as weight, in the proportion left / unsent of its element, and weight that waits after a step, divided by weight
    that arrives in a step, is the mean number of steps waited.

    Args:
        skip: first steps that are not counted, since nothing waits yet.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip, self._steps = skip, 0
        self._delivered = self._waited = self._arrived = 0.0  # sums over steps
        self._left = self._waiting = torch.zeros(
            (), dtype=torch.float32, device="cpu"
        )  # [m], after the last step: what was left, and weights

    @torch.no_grad()
    def step(self, unsent: Tensor, left: Tensor) -> None:
        """Take in a step: of P ranks and m elements, [P, m] each, or their sums, [1, m]."""
        unsent, left = unsent.sum(0), left.sum(0)
        arrived = (unsent - self._left).square()
        self._left, self._waiting = left, (self._waiting + arrived) * part_left(unsent, left)
        self._steps += 1
        if self._steps > self._skip:
            self._delivered += delivered(float(unsent.square().sum()), float(left.square().sum()))
            self._waited += float(self._waiting.sum())
            self._arrived += float(arrived.sum())

    @property
    def delivered(self) -> float:
        """The part of what is unsent on all ranks together, as a squared norm, that a step delivers; the mean."""
        counted = self._steps - self._skip
        return self._delivered / counted if counted > 0 else 1.0

    @property
    def staleness(self) -> float:
        """The steps that a gradient waits before it is delivered; 0 where everything is delivered at once."""
        return self._waited / self._arrived if self._arrived else 0.0
