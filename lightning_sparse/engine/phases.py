"""Where a training with local steps is: what may happen there, and when a step ends."""

from collections.abc import Sequence
from enum import Enum


class Phase(Enum):
    """Where a training with local steps is, and whose weights the parameters hold.

    ========  =======================================  ==========  ==============================================
    phase     from                                     weights     until
    ========  =======================================  ==========  ==============================================
    BETWEEN   the end of the optimizer's step          own         the next forward that trains, or SHOWN
    STEP      a forward that trains                    own         the optimizer has stepped, or SHOWN
    SHOWN     the start; whenever somebody asks        average     the next forward that trains, or optimizer step
    ENDED     the engine is closed                     average     for good
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
