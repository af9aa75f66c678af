"""What of a training with local steps is averaged, seen from outside, and kept in a checkpoint."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.adam import MeanMoments
from lightning_sparse.engine.buffers import ModuleBuffers
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import carry_over
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.replica import Find, Replica
from lightning_sparse.engine.scratch import Scratch
from lightning_sparse.engine.second_moments import SecondMoments
from lightning_sparse.engine.set_by_others import SetByOthers
from lightning_sparse.engine.untrained import Comparison, Untrained, replicas_of
from lightning_sparse.engine.weights import Weights
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
        buffers: ModuleBuffers,
    ) -> None:
        super().__init__(groups, comms, threaded=threaded)
        self.settings = settings
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
    def members(self) -> int:
        """Who averages now; the ranks, all of them."""
        return self._lanes[0].comm.size

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
        """Average what has changed, too, starting from the mean over the ranks."""
        for replica in self._replicas_of(self._comparison.end()):
            own = replica.average.clone()
            replica.average.copy_(self.ask(lambda comm, own=own: comm.all_reduce(own)) / self.members)  # type: ignore[misc]
            self.weights.add(replica)

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

    def kept(self) -> Iterator[Group]:
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
        return self.moments.sampled

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
