"""Frozen parameters: which of them change, though no optimizer trains them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future as LaneFuture
from functools import partial, reduce
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_sparse.checks import uncompiled
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.local_steps.replica import Find, Replica
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.agreement import differing
from lightning_sparse.network.cut import WHOLE, Cut, shard_of


class Untrained:
    """Watches the tensors of a module that no optimizer trains, and that differ between ranks once they change.

    A teacher that follows the student, a target network: with averaged gradients they are the same on every rank by
    themselves, with local steps they are not.  Backbones and tables never change, and cost nothing here but a look.
    """

    def __init__(self, found: Mapping[str, Find]) -> None:
        self.watched = dict(found)
        self.seen: dict[str, Tensor] = {}  # checksums before the first step

    def begin(self) -> None:
        """Note what they are before the first step; also of those that came to be watched since."""
        for name, find in self.watched.items():
            if name not in self.seen:
                self.seen[name] = checksum(shard_of(find()))

    def resume(self, seen: Mapping[str, Tensor]) -> None:
        """Go on with what :attr:`seen` was, which a checkpoint has on the CPU."""
        self.seen.update({name: x.to(self.watched[name]().device) for name, x in seen.items() if name in self.watched})

    def changed(self) -> Tensor:
        """Whether each has changed on this rank since the first step, in the order of ``watched``: [k] uint8."""
        changes = [not torch.equal(checksum(shard_of(find())), self.seen[name]) for name, find in self.watched.items()]
        return torch.tensor(changes, dtype=torch.uint8, device="cpu")

    def take(self, names: Collection[str]) -> dict[str, Find]:
        """Watch those of ``names`` no longer: they are averaged from now on; returns how to find each."""
        for name in names:
            self.seen.pop(name, None)
        return {name: self.watched.pop(name) for name in list(self.watched) if name in names}


class Comparison:
    """What ranks tell each other from time to time: which of ``untrained`` have changed, and averages that were set.

    Where members have several ranks, these tell each other a checksum of their weights too, which must be the same.
    """

    def __init__(self, untrained: Untrained, device: torch.device) -> None:
        self.untrained, self._device = untrained, device
        self.leads_in_vain = False  # an optimizer of this rank makes a lead vain
        self.lead_ends = False  # one of any rank does, as ranks have told each other
        self._set = 0  # a checksum of averages that somebody has set since the ranks have compared it
        self.under_way: LaneFuture[Tensor] | None = None  # [P, 2 + k] int64
        self._sent: tuple[Lane, Tensor] | None = None  # what is under way, whose memory must stay, and where

    def note(self, checksum: int) -> None:
        """Note that somebody has set the average, which has this checksum now, however often and when."""
        self._set = 1 + checksum % 2**62

    def begin(self, lane: Lane, weights: Callable[[], Tensor]) -> None:
        """Tell the other ranks, and those of this member a checksum of its ``weights``; to be called on every rank."""
        self.untrained.begin()
        of_member = [weights().view(1)] if lane.comm.inside is not None else []
        own = torch.tensor([self._set, self.leads_in_vain], dtype=torch.int64, device="cpu")
        parts = (part.to(self._device, non_blocking=True) for part in (own, *of_member, self.untrained.changed()))
        row = torch.cat(list(parts))
        self._set, self._sent = 0, (lane, row)
        lane.wait_for_caller()
        self.under_way = lane.submit(lambda: lane.comm.everyone.all_gather(row).wait())

    def end(self) -> list[str]:
        """Return the names of those that have changed on any rank, if ranks have told each other.

        Raises:
            RuntimeError: on every rank, if averages were set that are not the same, or the weights of a member are not.
        """
        if self.under_way is None:
            return []
        result, self.under_way = self.under_way.result(), None
        assert self._sent is not None
        (lane, _), self._sent = self._sent, None
        lane.have_caller_wait()
        rows, comm = result.cpu(), lane.comm
        columns = [range(len(rows))] if comm.everyone is comm else comm.members.columns
        if parties := differing(rows[:, 0].tolist(), columns):
            raise RuntimeError(
                "Weights that are set while the parameters hold the average of all ranks must be set on every rank, to "
                f"the same; got others on {parties}. Load or change weights on all of them."
            )
        self.lead_ends = bool(rows[:, 1].any())
        if comm.inside is not None and (parties := differing(rows[:, 2].tolist(), comm.members.ranks)):
            raise RuntimeError(
                "The ranks of a machine must have the same weights, which they train together; got others on "
                f"{parties}. Set weights on all of them, and have optimizers draw the same random numbers on all."
            )
        changed = rows[:, -len(self.untrained.watched) :].any(0).tolist() if self.untrained.watched else []
        return [name for name, moved in zip(self.untrained.watched, changed, strict=True) if moved]


def replicas_of(
    found: Mapping[str, Find], compressor: Compressor, settings: LocalSteps, others: Sequence[Replica], cut: Cut = WHOLE
) -> list[Replica]:
    """Make replicas of frozen parameters, one of each type, beside ``others``, in the fragment that has least."""
    made: list[Replica] = []
    kinds = {name: str(find().dtype) for name, find in found.items()}
    for _, members in groupby(sorted(found, key=lambda name: kinds[name]), kinds.__getitem__):
        names = tuple(members)
        group = Group(len(others) + len(made), names, tuple(found[name]().detach() for name in names), cut)
        sizes = [0] * settings.parts
        for replica in (*others, *made):
            sizes[replica.fragment] += replica.group.elements
        finds = [found[name] for name in names]
        made.append(Replica(group, compressor, sizes.index(min(sizes)), settings, finds))
    return made


def untrained_of(
    module: nn.Module, ignored: Collection[str], sharded: Mapping[str, Tensor] | None = None
) -> dict[str, Find]:
    """How to find each frozen parameter of ``module`` by name, but for those ``ignored``.

    ``sharded`` are those that FSDP2 shards, in whose place the module has whole ones at times.
    """
    frozen = [(name, p) for name, p in module.named_parameters() if p.is_floating_point() and not p.requires_grad]
    found: dict[str, Find] = {uncompiled(name): TensorLocator(module, name, p.shape) for name, p in frozen}
    found |= {name: partial((sharded or {}).__getitem__, name) for name in found.keys() & (sharded or {}).keys()}
    return {name: find for name, find in found.items() if name not in ignored}


class TensorLocator:
    """Finds a tensor where ``module`` has it now, which may have put another there, or another module around it."""

    def __init__(self, module: nn.Module, name: str, shape: torch.Size) -> None:
        self._module, self._name, self._shape = module, name, shape

    def __call__(self) -> Tensor:
        owner, _, leaf = self._name.rpartition(".")
        module = reduce(getattr, filter(None, owner.split(".")), self._module)  # also of a scripted module
        tensor: object = getattr(module, leaf, None)
        if not isinstance(tensor, Tensor) or tensor.shape != self._shape:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise RuntimeError(
                f"{self._name} must keep the shape {list(self._shape)} that it had when the training began: with local "
                f"steps it is averaged over the ranks; got {got}. Make it a buffer, which may change its shape."
            )
        return tensor
