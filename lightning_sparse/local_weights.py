"""Local steps under a Trainer: whoever looks at the weights beside training sees the average that the ranks share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_sparse.checks import class_names
from lightning_sparse.elastic.averager import ElasticAverager
from lightning_sparse.engine.averager import Averager
from lightning_sparse.hook import SparseHook
from lightning_sparse.options import Options
from lightning_sparse.signals import MeetsAtSignals

WEIGHT_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}  # callbacks that read weights after a step

# The mixin serves lightning and pytorch_lightning, whose classes are unrelated; type checkers see the first.
if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class ShowsAverage(MeetsAtSignals, _Base):
    """The part of a strategy that has the parameters hold the average wherever they are not trained."""

    options: Options
    hook: SparseHook | None  # during fit, and afterwards

    @property
    def exchange(self) -> Averager | None:
        """The engine, during fit and afterwards."""
        return self.hook.exchange if self.hook else None

    def evaluates(self, _: nn.Module) -> bool:
        """Whether the Trainer is at an evaluation, whose forwards may have gradients; the mode of DDP says nothing."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and not module.trainer.training

    def configure_ddp(self) -> None:
        """Wrap the model; have the average shown before callbacks look at the weights, or set them."""
        super().configure_ddp()
        module = self.lightning_module
        assert module is not None
        callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self.options.may_be_local and not any(isinstance(callback, BeforeCallbacks) for callback in callbacks):
            callbacks.insert(0, BeforeCallbacks())

    def on_validation_start(self) -> None:
        self.show_average()
        super().on_validation_start()

    def on_test_start(self) -> None:
        self.show_average()
        super().on_test_start()

    def on_predict_start(self) -> None:
        self.show_average()
        super().on_predict_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Save and export the average, also within a step, whose weights stay as they are."""
        module, exchange = self.lightning_module, self.exchange
        if module is None or exchange is None:
            return super().lightning_module_state_dict()
        local = exchange.local
        if local is None or not local.within_step:
            self.show_average()
        state: dict[str, Any] = _with_other_values(
            module, local.shared if local else {}, super().lightning_module_state_dict
        )
        return state

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take a step, which ends it for local steps, also where a gradient scaler has skipped it."""
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except BaseException:
            if self.exchange is not None and self.exchange.local is not None:
                self.exchange.local.after_update()  # before a callback saves the optimizer
            raise
        if self.exchange is not None:
            self.exchange.end_step()
        return output

    def show_average(self) -> None:
        """Have the parameters hold the average until the next forward that trains."""
        if self.exchange is not None:
            self.exchange.show_average(settle=not self._is_broken())

    def compare_averages(self) -> None:
        """Compare what was set after the last step, while every rank is there; raise a RuntimeError if it differs."""
        if self.exchange is not None and self.exchange.local is not None and not self._is_broken():
            self.exchange.local.compare_averages()

    def _is_broken(self) -> bool:
        """Whether other ranks may be gone, so that a message might wait for them."""
        module = self.lightning_module
        assert self.exchange is not None
        is_interrupted = module is not None and module.trainer.interrupted and not self.ends_together
        return self.exchange.error is not None or is_interrupted

    def teardown(self) -> None:
        """Leave the average behind, also where training was interrupted."""
        if self.exchange is not None:
            self.exchange.show_average(settle=False)
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            callbacks: list[Any] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [callback for callback in callbacks if not isinstance(callback, BeforeCallbacks)]
        super().teardown()


class BeforeCallbacks(Callback):
    """Shows the average before other callbacks do what they do at an evaluation, or at the end of an epoch or training.

    So what they set, such as the best weights, is set on the average, and stays.  It stands before all others.
    Callbacks that average weights over time see the average after every batch.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Meet other hosts before the first batch, once callbacks have made their schedules."""
        averager = getattr(trainer.strategy, "exchange", None)
        if isinstance(averager, ElasticAverager):
            averager.enter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        kinds = class_names(trainer.callbacks)  # type: ignore[attr-defined]
        exchange = getattr(trainer.strategy, "exchange", None)
        if kinds & WEIGHT_AVERAGING and exchange is not None and not (exchange.local and exchange.local.within_step):
            exchange.show_average(buffers=False)  # of which each rank averages its own, as with DDP

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, ShowsAverage):
            trainer.strategy.show_average()

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = on_train_epoch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the average, also of what has changed since ranks looked at it."""
        strategy = trainer.strategy
        if isinstance(strategy, ShowsAverage) and strategy.exchange is not None and not strategy._is_broken():
            if strategy.exchange.local is not None:
                strategy.exchange.local.compared()
        self.on_train_epoch_end(trainer, pl_module)


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
