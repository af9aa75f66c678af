"""One host of an elastic training under a Trainer: its data, and what it gets when it joins others."""

import copy
import zlib
from typing import Any

from lightning_sparse.local_weights import ShowsAverage


class ElasticHost(ShowsAverage):
    """The part of a strategy that is one of several hosts, each with a Trainer of its own."""

    def configure_ddp(self) -> None:
        """Wrap the model, and say what of the Trainer a host gets that joins.

        Raises:
            ValueError: there is more than one process in this host's training.
        """
        if self.options.hosts is not None and self.world_size != 1:
            raise ValueError(
                f"with elastic every process must be a training of its own; got one of {self.world_size} processes. "
                "Give the Trainer devices=1 and num_nodes=1, and start one process for each device, without torchrun."
            )
        super().configure_ddp()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As ever; a host of several has all data, in an order of its own."""
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs
        if (hosts := self.options.hosts) is None:
            return kwargs
        return kwargs | {"seed": zlib.crc32(hosts.name().encode())}

    def training_state(self) -> dict[str, Any]:
        """What a host that joins gets of this one's Trainer: optimizers, schedules, and how far it is."""
        trainer = self._trainer
        return {
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedulers": [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Go on as the host that returned ``state``; in the middle of an epoch that is this host's own."""
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        trainer = self._trainer
        for each, kept in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(kept)
        self._go_to(state["global_step"])
        if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            epochs: Any = trainer.fit_loop.epoch_progress.current
            epochs.ready = epochs.started = epochs.processed = epochs.completed = state["epoch"]

    def last_step(self) -> int:
        """The Trainer's ``max_steps``."""
        return int(self._trainer.max_steps)

    def steps_taken(self) -> int:
        """The Trainer's ``global_step``."""
        return int(self._trainer.global_step)

    def skip_steps(self, steps: int) -> None:
        """Count so many more, and have schedules go on that Lightning steps after each."""
        before = self.steps_taken()
        self._go_to(before + steps)
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            return  # its own code steps schedules
        for each in trainer.lr_scheduler_configs:
            if each.interval == "step" and not each.reduce_on_plateau:
                for _ in range((before + steps) // each.frequency - before // each.frequency):
                    each.scheduler.step()

    def _go_to(self, step: int) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        steps = loop.automatic_optimization.optim_progress.optimizer.step.total
        if not self._trainer.lightning_module.automatic_optimization:
            steps = loop.manual_optimization.optim_step_progress.total
        under_way = steps.ready - steps.completed
        steps.completed = step
        steps.ready = step + under_way

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer
