"""Local steps under a Trainer: whoever looks at the weights beside training sees the average that the ranks share."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_sparse.checks import class_names
from lightning_sparse.elastic.averager import ElasticAverager
from lightning_sparse.engine.averager import Averager

WEIGHT_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}  # callbacks that read weights after a step


class ShownAverage:
    """Has the parameters hold the average wherever they are not trained; a strategy holds one, with its hook.

    It knows the ``strategy`` weakly, by which it is held, and asks it for what may change: the averager, since
    ``sparse_auto`` changes it, and the module, which may be of another Trainer after the fit.
    """

    def __init__(self, strategy: Any) -> None:
        self._owner = weakref.ref(strategy)

    @property
    def _strategy(self) -> Any:
        strategy = self._owner()
        assert strategy is not None
        return strategy

    @property
    def averager(self) -> Averager:
        """The averager, during fit and afterwards."""
        averager: Averager = self._strategy.averager
        return averager

    def others_may_be_gone(self) -> bool:
        """Whether other ranks may be gone, so that a message might wait for them."""
        strategy = self._strategy
        module = strategy.lightning_module
        is_interrupted = module is not None and module.trainer.interrupted and not strategy.signals.ends_together
        return self.averager.error is not None or is_interrupted

    def show(self) -> None:
        """Have the parameters hold the average until the next forward that trains."""
        self.averager.show_average(settle=not self.others_may_be_gone())

    def compare(self) -> None:
        """Compare what was set after the last step, while every rank is there; raise a RuntimeError if it differs."""
        if self.averager.local is not None and not self.others_may_be_gone():
            self.averager.local.compare_averages()

    def leave_behind(self) -> None:
        """Leave the average behind when a Trainer ends, also where training was interrupted."""
        self.averager.show_average(settle=False)
        module = self._strategy.lightning_module
        if module is not None and module._trainer is not None:
            callbacks: list[Any] = module.trainer.callbacks
            callbacks[:] = [callback for callback in callbacks if not isinstance(callback, BeforeCallbacks)]

    def state_dict(self, get: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``get`` returns of the average, also within a step, whose weights stay as they are."""
        local = self.averager.local
        if local is None or not local.within_step:
            self._strategy.show_average()  # which a user's own strategy may have extended
        # Of members of several ranks each has a slice of the average, which all must be there to put together.
        may_gather = self.averager.cut.count == 1 or not self.others_may_be_gone()
        shared = local.shared if local and may_gather else {}
        state: dict[str, Any] = _with_other_values(self._strategy.lightning_module, shared, get)
        return state


class BeforeCallbacks(Callback):
    """Shows the average before other callbacks do what they do at an evaluation, or at the end of an epoch or training.

    So what they set, such as the best weights, is set on the average, and stays.  It stands before all others.
    Callbacks that average weights over time see the average after every batch.
    """

    @staticmethod
    def put_before(callbacks: list[Any]) -> None:
        """Put one before all other ``callbacks``, unless there is one; :meth:`ShownAverage.leave_behind` removes it."""
        if not any(isinstance(callback, BeforeCallbacks) for callback in callbacks):
            callbacks.insert(0, BeforeCallbacks())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Meet other hosts before the first batch, once callbacks have made their schedules."""
        if (average := _of(trainer)) is not None and isinstance(average.averager, ElasticAverager):
            average.averager.enter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        kinds = class_names(trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
        average = _of(trainer)
        if not kinds & WEIGHT_AVERAGING or average is None:
            return
        if not (average.averager.local and average.averager.local.within_step):
            average.averager.show_average(buffers=False)  # of which each rank averages its own, as with DDP

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _of(trainer) is not None:
            trainer.strategy.show_average()  # type: ignore[attr-defined]  # which has a shown average

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = on_train_epoch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the average, also of what has changed since ranks looked at it."""
        average = _of(trainer)
        if average is not None and average.averager.local is not None and not average.others_may_be_gone():
            average.averager.local.compared()
        self.on_train_epoch_end(trainer, pl_module)


def _of(trainer: Trainer) -> ShownAverage | None:
    """What the strategy of ``trainer`` holds; None where it is a strategy of others, or has no hook."""
    average: ShownAverage | None = getattr(trainer.strategy, "shown_average", None)
    return average


class _Called(nn.Module):
    """A module that calls a function about another module where it is called itself."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def forward(self) -> Any:
        return self._function()


def _with_other_values(module: nn.Module, values: Mapping[Tensor, Tensor], function: Any) -> Any:
    """Return what ``function`` returns while ``values`` stand in the place of parameters and buffers of ``module``.

    Nothing is copied, and the parameters themselves stay as they are.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    others = {f"module.{name}": values[x].to(x.dtype) for name, x in named if values.get(x, x) is not x}
    return torch.func.functional_call(_Called(module, function), others, ()) if others else function()
