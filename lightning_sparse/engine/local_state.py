"""What of a training with local steps is averaged, seen from outside, and kept in a checkpoint."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.adam import MeanMoments
from lightning_sparse.engine.buffers import ModuleBuffers
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import carry_over
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.rates import Rates
from lightning_sparse.engine.replica import Find, Replica
from lightning_sparse.engine.scratch import Scratch
from lightning_sparse.engine.second_moments import SecondMoments
from lightning_sparse.engine.set_by_others import SetByOthers
from lightning_sparse.engine.untrained import Comparison, Untrained, replicas_of
from lightning_sparse.engine.weights import Weights
from lightning_sparse.network.agreement import ranks_having
from lightning_sparse.network.comm import Comm


class LocalState(Exchange):
    """The part of :class:`LocalExchange` that knows what it averages, and not when: its arguments are the same."""

    takes_local_steps = True

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        fragments: Sequence[int],
        comms: Sequence[Comm],
        threaded: bool,
        settings: LocalSteps,
        untrained: Mapping[str, Find],
        compressor: Compressor,
        lead_is_given: bool,
        buffers: ModuleBuffers,
    ) -> None:
        super().__init__(groups, comms, threaded=threaded)
        self.settings = settings
        self._rates = Rates(settings.lead or 1.0, lead_is_given)
        of = zip(groups, fragments, strict=True)
        scratch = Scratch()
        self.weights = Weights([Replica(group, c, i, settings, scratch=scratch) for (group, c), i in of])
        self.set_by_others = SetByOthers(self.weights)
        self.shared_buffers = buffers
        self.moments = SecondMoments(self.groups if settings.second_moments == "mean" else ())
        self.mean_moments = MeanMoments(self.moments)
        self.untrained = Untrained(untrained)  # and not averaged so far
        self._comparison = Comparison(self.untrained, self.device)
        self._compressor = compressor

    def take_over(self, before: Exchange, memories: bool) -> None:
        super().take_over(before, memories)
        assert isinstance(before, LocalState)
        self.untrained.resume(before.untrained.seen)
        self.shared_buffers.take_over(before.shared_buffers)
        if set(before.moments) == set(self.moments):  # else, as where a layer is frozen, they are compared anew
            before.moments.read(self.members)
            self.mean_moments.resume(before.mean_moments.state(), before.sampled, self.members)

    def add_to_next(self, groups: Sequence[Group]) -> None:
        carry_over(groups, list(zip(self.groups, self.compressors, strict=True)), memories=False)
        for replica in self.weights.replicas:
            replica.unsent_gradient = replica.group.unsent.clone()
            replica.group.unsent.zero_()

    @property
    def round(self) -> int:
        return self.settings.steps

    @property
    def members(self) -> int:
        """Who averages now; the ranks, all of them."""
        return self._lanes[0].comm.size

    # - how far ranks look ahead

    def note(self, optimizer: Optimizer) -> None:
        own = {p for group in self.groups for p in group.parameters}
        is_ours = any(p in own for group in optimizer.param_groups for p in group["params"])
        if is_ours and self._rates.may_end and self._rates.are_in_vain(optimizer):
            self._comparison.leads_in_vain = True
            if not self.steps:  # else messages may be under way, and ranks compare first
                self._end_lead()

    def _end_lead(self) -> None:
        """Look ahead no more; to be called on every rank, with no message under way."""
        if self._rates.may_end:
            self._rates.give_back()
            self._rates.factor, self.settings = 1.0, replace(self.settings, lead=1.0)
            for replica in self.weights.replicas:
                replica.lead = 1.0
            rank_zero_info(
                "lightning_sparse: local steps do not look ahead (lead=1): the steps of an optimizer do not grow with "
                "its learning rate."
            )

    # - what others have set

    def compare_averages(self) -> None:
        trained = {name for each in self.weights.replicas if not each.is_untrained for name in each.group.names}
        sums = {name: x for name, x in self.weights.checksums().items() if name in trained}
        if not sums:
            return
        own = torch.stack(list(sums.values())).to(self.device)
        every = self.ask(lambda comm: comm.all_gather(own)).cpu()  # [P, k]
        differ = [name for name, column in zip(sums, every.T, strict=True) if (column != column[0]).any()]
        if differ:
            parties = ranks_having([tuple(row) for row in every.tolist()])
            raise RuntimeError(
                "Weights that are set after the last step must be set on every rank, to the same, as they are the "
                f"average of all ranks then; got others on {' and on '.join(parties.values())}: {differ[0]}"
                f"{f' and {len(differ) - 1} more' if len(differ) > 1 else ''}. Set them on all ranks, or set them in a "
                "copy of the model."
            )

    # - whose weights and buffers the module holds

    def _show_buffers(self) -> None:
        self.shared_buffers.show(lambda work: self.on_lanes(work, lanes=1)[0], self.members)

    def _hide(self) -> None:
        self._note_what_was_set()
        self.shared_buffers.hide()
        if self.weights.shown:
            self.weights.hide()
            self.set_by_others.accept()

    def _note_what_was_set(self) -> None:
        self.weights.take_over()
        if self.weights.set_by_others:
            self.weights.set_by_others = False
            self._comparison.note(self.weights.checksum())

    # - what no optimizer trains

    def _begin_comparison(self) -> None:
        self._comparison.begin(self._lanes[0])

    def _end_comparison(self) -> None:
        """Average what has changed, too, starting from the mean over the ranks, and look ahead if that is of use."""
        for replica in self._replicas_of(self._comparison.end()):
            own = replica.average.clone()
            replica.average.copy_(self.ask(lambda comm, own=own: comm.all_reduce(own)) / self.members)  # type: ignore[misc]
            self.weights.add(replica)
        if self._comparison.lead_ends:
            self._end_lead()

    def adopt(self, groups: Iterable[Collection[str]]) -> None:
        for names in groups:
            for replica in self._replicas_of(names):
                self.weights.add(replica)

    def _replicas_of(self, names: Collection[str]) -> list[Replica]:
        found = self.untrained.take(names)
        made = replicas_of(found, self._compressor, self.settings, self.weights.replicas)
        self.lay_out([(each.group, each.compressor) for each in (*self.weights.replicas, *made)])
        return made

    # - checkpoints

    def kept(self, with_means: bool = True) -> Iterator[Group]:
        return self.weights.kept()

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        return self.shared_buffers.own()

    def hold(self, own: Mapping[str, Tensor], late: Collection[str]) -> None:
        self.shared_buffers.hold(own, late)

    @property
    def not_averaged(self) -> Mapping[str, Tensor]:
        return {name: find() for name, find in self.untrained.watched.items()}

    @property
    def sampled(self) -> Tensor | None:
        return self.mean_moments.sampled

    def state(self) -> dict[str, Any]:
        self.moments.read(self.members)
        return {
            "moments": {key: x.cpu() for key, x in self.mean_moments.state().items()},
            "checksums": self.weights.checksums() | self.shared_buffers.checksums(),
            "seen": {name: x.cpu() for name, x in self.untrained.seen.items()},
            "averages": self.weights.averages_beyond_parameters(),
            "differing": list(self.shared_buffers.differing),
        }

    def resume(self, state: Mapping[str, Any], sampled: Tensor | None) -> None:
        self.untrained.resume(state["seen"])
        self.shared_buffers.differing = list(state.get("differing", []))
        self.mean_moments.resume(state["moments"], sampled, self.members)

    @property
    def averages(self) -> Mapping[str, Tensor]:
        return self.weights.averages()

    @property
    def own(self) -> Mapping[str, Tensor]:
        """This rank's own weights x_r of each parameter by name, of its shape."""
        return self.weights.named(self.weights.own)

    @property
    def shared(self) -> Mapping[Tensor, Tensor]:
        return self.weights.shared_by_parameter()

    def unsent_of(self, group: Group) -> Tensor:
        return self.weights.unsent(self.weights.replicas[group.index])
