"""Steps with a loss scale, of which the host knows only later whether a rank overflowed in them."""

from collections.abc import Sequence

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group, HostCopy
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.gradient_record import GradientRecord
from lightning_sparse.engine.loss_scale import LossScale
from lightning_sparse.engine.sample import Sample
from lightning_sparse.network.comm import Comm


class ScaledSteps(Exchange):
    """The part of :class:`GradientExchange` that undoes a step in which a rank overflowed; its arguments are the same.

    On a device to know that would be to wait for it, so the step is undone when the next one begins, or when somebody
    looks at what it left.
    """

    def __init__(self, groups: Sequence[tuple[Group, Compressor]], comms: Sequence[Comm], *, threaded: bool) -> None:
        self._unsettled: tuple[LossScale, HostCopy] | None = None  # the last step, until it is known if it overflowed
        super().__init__(groups, comms, threaded=threaded)

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order in which they are sent, as the last step left them."""
        self._end_scaled_step()
        return self._groups

    @groups.setter
    def groups(self, groups: list[Group]) -> None:
        self._groups = groups

    @property
    def sample(self) -> Sample | None:
        """A sample of what is unsent, as the last step left it, while somebody wants to know how long it waits."""
        self._end_scaled_step()
        return self._sample

    @sample.setter
    def sample(self, sample: Sample | None) -> None:
        self._sample = sample

    def take_record(self) -> GradientRecord | None:
        """End the recording, and return the record if there is one, the last step included."""
        self._end_scaled_step()
        return super().take_record()

    def _end_if_known(self, loss_scale: LossScale | None, overflowed: HostCopy | None) -> None:
        """End a step now, or where it must be waited for to know how, later."""
        if loss_scale is not None and overflowed is not None and self.device.type != "cpu":
            self._unsettled = loss_scale, overflowed
        else:
            self._note_end(loss_scale, overflowed is not None and bool(overflowed.read()))

    def _end_scaled_step(self) -> None:
        """Undo the last step if a rank overflowed in it; on a device the host knows that only after the step."""
        if self._unsettled is not None:
            (loss_scale, overflowed), self._unsettled = self._unsettled, None
            undone = bool(overflowed.read())
            self.on_lanes(lambda lane: self._note_end(loss_scale, undone), lanes=1)

    def _note_end(self, loss_scale: LossScale | None, undone: bool) -> None:
        if loss_scale is not None:
            loss_scale.end_step(undone)
        for notes in () if undone else (self._sample, self._record):
            if notes is not None:
                notes.end_step()
