"""What the Trainer's strategies share, whatever shards the model: the average is shown, and steps are noted."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from lightning_sparse.auto.policy import Auto
from lightning_sparse.checks import renamed
from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.averager import Averager
from lightning_sparse.fusion.layer_fusion import LayerFusion
from lightning_sparse.hook import SparseHook
from lightning_sparse.network.process_groups import have_devices_keep_order
from lightning_sparse.options import Options
from lightning_sparse.trainer.shown_average import ShownAverage
from lightning_sparse.trainer.signals import Signals

# The mixin serves lightning and pytorch_lightning, whose classes are unrelated; type checkers see the first.
if TYPE_CHECKING:
    _Base = ParallelStrategy
else:
    _Base = object


class AveragingMixin(_Base):
    """The part that strategies have in common.

    Attributes:
        options: how gradients or weights are averaged.
        hook: during fit, and afterwards.
        shown_average: as long as there is a hook.
    """

    options: Options
    hook: SparseHook | None
    shown_average: ShownAverage | None
    signals: Signals

    def setup_environment(self) -> None:
        have_devices_keep_order()
        super().setup_environment()

    # - evaluations, and a training

    def on_validation_start(self) -> None:
        self.show_average()
        self.signals.watch(self)
        super().on_validation_start()

    def on_test_start(self) -> None:
        self.show_average()
        super().on_test_start()

    def on_predict_start(self) -> None:
        self.show_average()
        super().on_predict_start()

    def on_train_start(self) -> None:
        self.signals.watch(self)
        super().on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.signals.begin_batch()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take a step, which ends it for local steps, also where a gradient scaler has skipped it."""
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except BaseException:
            if self.averager is not None and self.averager.local is not None:
                self.averager.local.after_update()  # before a callback saves the optimizer
            raise
        if self.averager is not None:
            self.averager.end_step()
        return output

    # - checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Save and export the average, also within a step, whose weights stay as they are."""
        if self.lightning_module is None or self.shown_average is None:
            return super().lightning_module_state_dict()
        return self.shown_average.state_dict(super().lightning_module_state_dict)

    @property
    def is_within_a_batch(self) -> bool:
        """Whether a resume takes up a batch again, whose step may be half made."""
        module = self.lightning_module
        if module is None or module._trainer is None:
            return False
        batches: Any = module.trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(batches.processed < batches.started)

    # - the end

    def teardown(self) -> None:
        """End the averager's threads and process groups; the default group outlives them."""
        try:
            if self.shown_average is not None:
                self.shown_average.compare()
        finally:
            if self.hook is not None:
                self.hook.close()
            if self.shown_average is not None:
                self.shown_average.leave_behind()
            with self.signals.forgotten(self):
                super().teardown()

    # - what others ask

    @property
    def compressor(self) -> Compressor | Auto:
        """The compressor that averages, or the policy that chooses one."""
        return self.options.compressor

    @property
    def averager(self) -> Averager | None:
        """The averager, during fit and afterwards."""
        return self.hook.averager if self.hook else None

    exchange = renamed("exchange", "averager")

    @property
    def layer_fusion(self) -> LayerFusion | None:
        """The planner of the groups with ``fusion="layer"``, during fit and afterwards."""
        return self.hook.layer_fusion if self.hook else None

    def show_average(self) -> None:
        """Have the parameters hold the average until the next forward that trains."""
        if self.shown_average is not None:
            self.shown_average.show()

    def evaluates(self, _: nn.Module) -> bool:
        """Whether the Trainer is at an evaluation, whose forwards may have gradients; the mode of a model says nothing.

        Of no model: that is what a forward of it would be now.
        """
        module = self.lightning_module
        return module is not None and module._trainer is not None and not module.trainer.training
