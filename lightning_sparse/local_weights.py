"""Local steps under a Trainer: whoever looks at the weights beside training sees the average that the ranks share."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.hook import SparseHook

WEIGHT_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}  # callbacks that read weights after a step

# The mixin serves lightning and pytorch_lightning, whose classes are unrelated; type checkers see the first.
if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class ShowsAverage(_Base):
    """The part of a strategy that has the parameters hold the average wherever they are not trained."""

    hook: SparseHook | None  # during fit, and afterwards

    @property
    def exchange(self) -> Exchange | None:
        """The engine, during fit and afterwards."""
        return self.hook.exchange if self.hook else None

    def on_validation_start(self) -> None:
        """Validate the average."""
        self._show_average()
        super().on_validation_start()

    def on_test_start(self) -> None:
        """Test the average."""
        self._show_average()
        super().on_test_start()

    def on_predict_start(self) -> None:
        """Predict with the average."""
        self._show_average()
        super().on_predict_start()

    def on_train_end(self) -> None:
        """Leave the average behind."""
        self._show_average()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Save and export the average."""
        self._show_average()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take a step; show the average after it to callbacks that average weights over time."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(self.exchange, LocalExchange) and self._averages_over_time():
            self._show_average()
        return output

    def _averages_over_time(self) -> bool:
        module = self.lightning_module
        if module is None or not module.automatic_optimization:
            return False
        kinds = {kind.__name__ for callback in module.trainer.callbacks for kind in type(callback).__mro__}  # type: ignore[attr-defined]
        return bool(kinds & WEIGHT_AVERAGING)

    def _show_average(self) -> None:
        if isinstance(self.exchange, LocalExchange):
            self.exchange.show_average(settle=not self._is_broken())

    def _is_broken(self) -> bool:
        """Whether other ranks may be gone, so that a message might wait for them."""
        module = self.lightning_module
        assert self.exchange is not None
        return self.exchange.error is not None or (module is not None and module.trainer.interrupted)

    def teardown(self) -> None:
        """Leave the average behind, also where training was interrupted."""
        if isinstance(self.exchange, LocalExchange):
            self.exchange.show_average(settle=False)
        super().teardown()
