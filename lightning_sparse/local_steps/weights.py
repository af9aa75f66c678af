"""Whose weights the parameters hold, this rank's own or the average that all ranks share, and in which phase."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from enum import Enum

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.checksum import as_integers, checksum
from lightning_sparse.engine.inside import share, whole_of
from lightning_sparse.local_steps.replica import HALVES, Replica
from lightning_sparse.network.comm import Comm, completed
from lightning_sparse.network.cut import as_shard_of, version_of


class Phase(Enum):
    """Where a training with local steps is, and whose weights the parameters hold.

    ========  =======================================  ==========  ==============================================
    phase     from                                     weights     until
    ========  =======================================  ==========  ==============================================
    BETWEEN   the end of the optimizer's step          own         the next forward that trains, or SHOWN
    STEP      a forward that trains                    own         the optimizer has stepped, or SHOWN
    SHOWN     the start; whenever somebody asks        average     the next forward that trains, or optimizer step
    ENDED     the averager is closed                   average     for good
    ========  =======================================  ==========  ==============================================
    """

    BETWEEN = "between two steps"
    STEP = "within a step"
    SHOWN = "showing the average"
    ENDED = "ended"


class Phases:
    """The phases of a training, and the transitions that are allowed.

    A step is open from the first forward that trains to the end of the optimizer's step.  It counts if a backward has
    been in it that DDP synchronises, whatever the optimizers did, so that ranks count alike.
    """

    def __init__(self) -> None:
        self.now = Phase.SHOWN
        self.backwards = 0  # that were synchronised since the last step was settled
        self._in_forward = False
        self._stepped = False  # an optimizer has, since the last backward
        self._versions: Sequence[int] = ()  # of the parameters, after the last backward
        self._in_optimizer = self._backward_in_optimizer = False
        self._knows_optimizers = False  # there are some whose steps are noticed
        self._has_settled = False

    def begin_forward(self, half_made: bool) -> None:
        """Enter a forward that trains.

        Raises:
            RuntimeError: after the end.
        """
        if self.now is Phase.ENDED:
            raise RuntimeError(
                "the hook on this DistributedDataParallel was closed, so it averages no weights any more; to train on, "
                "make a new DistributedDataParallel and a new hook."
            )
        self.now, self._in_forward = Phase.STEP, True
        self._stepped = self._stepped and half_made

    def end_forward(self) -> None:
        """Leave a forward, if it was one that trains."""
        self._in_forward = False
        self._end_step_if_over()

    def backward(self, versions: Sequence[int]) -> None:
        """Count a backward that DDP has synchronised, after which parameters have these ``versions``."""
        self.backwards += 1
        self._stepped, self._backward_in_optimizer, self._versions = False, self._in_optimizer, versions

    def check_backward(self) -> None:
        """Raise a RuntimeError if the weights of a backward are the average, of which no rank takes a step."""
        if self.now is Phase.SHOWN:
            raise RuntimeError(
                "a backward must follow a forward that trains; got one while the parameters hold the average of all "
                "ranks, as in evaluation. Call train() on the DistributedDataParallel for every forward that is "
                "trained on, and eval() on single layers only, such as batch norm."
            )

    def begin_optimizer(self) -> None:
        """Enter an optimizer's step, which is of this rank's own weights."""
        self._in_optimizer, self._backward_in_optimizer = True, False
        if self.now is Phase.SHOWN:
            self.now = Phase.STEP

    def end_optimizer(self) -> None:
        self._in_optimizer, self._stepped, self._knows_optimizers = False, True, True

    def end_step(self) -> None:
        """Note that optimizers have stepped, or skipped a step, on every rank."""
        self._stepped = True
        self._end_step_if_over()

    def _end_step_if_over(self) -> None:
        if self.now is Phase.STEP and self._stepped and not self._in_forward:
            self.now = Phase.BETWEEN

    def check_show(self) -> None:
        """Raise a RuntimeError within a forward that trains, where nobody may change the weights."""
        if self._in_forward:
            raise RuntimeError(
                "show_average() must be called between two steps; got a call within a forward that trains, whose "
                "weights would change under it. Call it after the optimizer's step."
            )

    def show(self) -> None:
        if self.now is not Phase.ENDED:
            self.now = Phase.SHOWN

    def settle(self) -> None:
        self.backwards, self._has_settled = 0, True

    def end(self) -> None:
        self.now, self._in_forward, self.backwards = Phase.ENDED, False, 0

    def restart(self) -> None:
        self.now, self.backwards = Phase.SHOWN, 0

    def is_half_made(self, versions: Sequence[int]) -> bool:
        """Whether an optimizer needs another forward for its step, as sharpness-aware minimisation (SAM) does.

        It asks its closure again; or it has changed the weights, which have these ``versions`` now, and will restore
        them.
        """
        if self._in_optimizer and self._backward_in_optimizer:
            return True
        if not self._knows_optimizers and (self._has_settled or self.backwards > 1):
            return False  # the weights are moved by hand
        return bool(self.backwards) and not self._stepped and self._versions != versions


class Weights:
    """The only place where a rank's own weights x_r and the average x̄ change places in the parameters.

    Weights that somebody else sets while the average is shown, such as a loaded checkpoint, are the new average, of
    which nothing is unsent.

    Args:
        replicas: of all groups.
        inside: the ranks of this member, each of which owns a slice of every parameter; None where it is one rank.
        make_ready: to be called before parameters are set.
    """

    def __init__(
        self, replicas: Sequence[Replica], inside: Comm | None = None, make_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.replicas, self._inside, self._make_ready = list(replicas), inside, make_ready
        # While the average is shown, of each parameter this rank's own weights; None where they are the average.
        self._held: list[list[Tensor | None]] | None = [[None] * len(each.group.names) for each in self.replicas]
        self.set_by_others = False  # somebody has set the average; whoever looks resets it
        self._late = False  # what is held is from a checkpoint, whose average is not in the parameters yet

    @property
    def shown(self) -> bool:
        return self._held is not None

    def add(self, replica: Replica) -> None:
        """Take care of one replica more, whose tensors hold this rank's own values."""
        self.replicas.append(replica)
        if self._held is not None:
            self._held.append(_show(replica))

    def show(self) -> None:
        if self._held is None:
            self._make_ready()
            self._held = [_show(replica) for replica in self.replicas]
            self.share(self.replicas)

    def apply_moves(self, replicas: Sequence[Replica]) -> None:
        """Move x̄ of those by what has arrived, and set the parameters to this rank's own weights."""
        self._make_ready()
        for each in replicas:
            each.apply_move()
        self.share(replicas)

    def share(self, replicas: Sequence[Replica]) -> None:
        """Have all ranks of this member hold what each has set of the slices that it owns."""
        if self._inside is not None:
            for each in replicas:  # not at once: memory for messages is kept, for as many elements as the largest has
                completed(share(each.wholes(), each.group.cut, self._inside))

    @torch.no_grad()
    def hide(self) -> None:
        self.take_over()
        self._make_ready()
        for replica, held in zip(self.replicas, self._held or [], strict=False):
            for p, own in zip(replica.wholes(), held, strict=True):
                if own is not None:
                    p.copy_(own)
        self._held, self._late = None, False

    @torch.no_grad()
    def take_over(self) -> None:
        """Take what others have set while the average was shown for the average."""
        for replica, held in zip(self.replicas, self._held or [], strict=False):
            self._take_over(replica, held)

    def _take_over(self, replica: Replica, held: list[Tensor | None]) -> None:
        for place, (p, average) in enumerate(zip(replica.values(), replica.averages(), strict=True)):
            if not torch.equal(as_integers(p), as_integers(average.to(p.dtype))):  # whoever changed it, and how
                replica.start_from(place, p, keep_aside=self._late)
                held[place] = held[place] if self._late else None
                self.set_by_others = not self._late or self.set_by_others

    def own(self, replica: Replica) -> list[Tensor]:
        if self._held is None:
            return replica.values()
        held = self._held[self.replicas.index(replica)]
        self._take_over(replica, held)
        cut = replica.group.cut
        return [p if own is None else cut.own(own) for p, own in zip(replica.values(), held, strict=True)]

    def shared(self, replica: Replica) -> list[Tensor]:
        """The average of each parameter, of its shape; where it is shown the parameter itself.

        Where members have several ranks all of these must ask.
        """
        return replica.wholes() if self.shown else self._whole(replica, replica.averages())

    def _whole(self, replica: Replica, slices: Sequence[Tensor]) -> list[Tensor]:
        """All of each parameter, of which this rank has ``slices``."""
        return whole_of(slices, replica.wholes(), replica.group.cut, self._inside)

    def versions(self) -> list[int]:
        """The version of each parameter that is trained, which changes with its values."""
        trained = (replica.group.parameters for replica in self.replicas if not replica.is_untrained)
        return [version_of(p) for parameters in trained for p in parameters]

    def checksum(self) -> int:
        """One number that tells whether ranks have the same average."""
        return sum((place + 1) * int(checksum(replica.average)) for place, replica in enumerate(self.replicas))

    def checksum_of_own(self) -> Tensor:
        """One number that tells whether the ranks of a member have the same weights, [] int64; nobody waits for it."""
        held = self._held or [[None] * len(replica.group.names) for replica in self.replicas]
        every = (
            p if own is None else own
            for replica, of_replica in zip(self.replicas, held, strict=True)
            for p, own in zip(replica.wholes(), of_replica, strict=True)
        )
        sums = torch.stack([checksum(x.detach()) for x in every])
        return (sums * torch.arange(1, 1 + len(sums), device=sums.device)).sum()

    def unsent(self, replica: Replica) -> Tensor:
        """What is unsent of ``replica`` on this rank, x_r - x̄ [n] float32; nothing of a mask, which is not finite."""
        unsent = replica.unsent(self.own(replica)).float()
        return unsent.nan_to_num(0.0, 0.0, 0.0) if replica.is_untrained else unsent

    def unsent_gradients(self) -> dict[Tensor, Tensor]:
        """What is to be added to this rank's slice of each parameter's next gradient; empty once it was."""
        return {
            p: slot.view(shape)
            for replica in self.replicas
            if replica.unsent_gradient is not None
            for p, shape, slot in zip(
                replica.group.parameters,
                replica.group.shapes,
                replica.group.slots(replica.unsent_gradient),
                strict=True,
            )
        }

    def forget_unsent_gradients(self) -> None:
        for replica in self.replicas:
            replica.unsent_gradient = None

    # - all of them

    def named(self, of: Callable[[Replica], Sequence[Tensor]]) -> dict[str, Tensor]:
        """What ``of`` returns for the parameters of each replica, by name."""
        return {n: x for replica in self.replicas for n, x in zip(replica.group.names, of(replica), strict=True)}

    def averages(self) -> dict[str, Tensor]:
        """x̄ of each parameter by name, of its shape; float32, and float64 of tensors in float64."""
        self.take_over()
        return self.named(Replica.averages)

    def whole_averages(self, inside: Comm | None) -> dict[str, Tensor]:
        """As :meth:`averages`, all of each; to be asked for by all ranks ``inside`` a member, also after the end."""
        self.take_over()
        return self.named(lambda each: whole_of(each.averages(), each.wholes(), each.group.cut, inside))

    def checksums(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One of each of ``averages`` by name, in the precision of the parameter."""
        held = self.named(Replica.tensors)
        return {name: checksum(x.to(held[name].dtype)).cpu() for name, x in averages.items()}

    def beyond_parameters(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``averages`` that parameters cannot hold, in half precision."""
        held = self.named(Replica.tensors)
        return {name: x.cpu() for name, x in averages.items() if held[name].dtype in HALVES}

    def shared_by_parameter(self) -> dict[Tensor, Tensor]:
        """Each parameter's x̄, of its shape; where it is shown the parameter itself."""
        pairs = zip(self.named(Replica.parameters).values(), self.named(self.shared).values(), strict=True)
        return {p: p if self.shown else as_shard_of(p, average) for p, average in pairs}

    def kept(self) -> Iterator[Group]:
        """Yield each group as a checkpoint keeps it: with this rank's own weights x_r [n] in place of what is unsent.

        A message under way may still change what is unsent in the group itself.
        """
        for replica in self.replicas:
            group = copy(replica.group)
            group.unsent, group.memory = replica.saved(self.own(replica))
            yield group

    def restart(self) -> None:
        """Take what the parameters hold for the average, of which nothing is unsent."""
        self._held, self._late = [[None] * len(each.group.names) for each in self.replicas], False
        for replica in self.replicas:
            for place, tensor in enumerate(replica.tensors()):
                replica.start_from(place, tensor)

    def restore(self, names: Collection[str], averages: Mapping[str, Tensor], late: bool) -> None:
        """Hold this rank's own weights of ``names``, which lie in ``unsent``, while the parameters hold x̄, or will.

        ``averages`` are x̄ of those that the parameters cannot hold exactly, in half precision.  If ``late``, x̄ is not
        in the parameters yet; else what they hold later, if it is anything else, is set by others.
        """
        self._held, self._late = [self._restored(replica, names, averages) for replica in self.replicas], late

    def _restored(
        self, replica: Replica, names: Collection[str], averages: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        group = replica.group
        for place, (name, tensor) in enumerate(zip(group.names, replica.tensors(), strict=True)):
            replica.start_from(place, averages.get(name, tensor))
        own = self._whole(replica, replica.restore(group.unsent.clone()))
        group.unsent.zero_()
        for place, (name, average) in enumerate(zip(group.names, replica.averages(), strict=True)):
            if name not in names:
                replica.start_from(place, average)
        return [weights if name in names else None for name, weights in zip(group.names, own, strict=True)]


def _show(replica: Replica) -> list[Tensor | None]:
    """Set what this rank owns of the parameters of ``replica`` to the average; return what they were, all of them."""
    own = [p.detach().clone() for p in replica.wholes()]
    with torch.no_grad():
        for p, average in zip(replica.tensors(), replica.averages(), strict=True):
            p.copy_(average)
    return list(own)
