"""One host of an elastic training under a Trainer: its data, and what it gets when it joins others."""

import copy
import math
import sys
import zlib
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.local_weights import ShowsAverage
from lightning_sparse.network.agreement import differences
from lightning_sparse.settings import as_text

NEVER = sys.maxsize  # batches from one step of a schedule to the next


class ElasticHost(ShowsAverage):
    """The part of a strategy that is one of several hosts, each with a Trainer of its own."""

    _schedules: list[tuple[Any, int]] = []  # noqa: RUF012  # those that Lightning steps, and steps from one to the next

    def configure_ddp(self) -> None:
        """Wrap the model, and say what of the Trainer a host gets that joins.

        Raises:
            ValueError: there is more than one process in this host's training, or something needs to see all hosts.
        """
        if self.options.hosts is not None:
            if self.world_size != 1:
                raise ValueError(
                    f"with elastic every process must be a training of its own; got one of {self.world_size} "
                    "processes. Give the Trainer devices=1 and num_nodes=1, and start one process for each device, "
                    "without torchrun."
                )
            if any(isinstance(each, torch.nn.SyncBatchNorm) for each in self._trainer.lightning_module.modules()):
                raise ValueError(
                    "SyncBatchNorm cannot be combined with elastic: it sees the ranks of one training, and hosts are "
                    "trainings of their own. Leave out sync_batchnorm=True, or the conversion of your own."
                )
            if any(type(each).__name__ == "LearningRateFinder" for each in self._trainer.callbacks):
                raise ValueError(
                    "LearningRateFinder cannot be combined with elastic: each host would find another rate. Find one "
                    "without elastic, and give it to all hosts."
                )
        super().configure_ddp()

    def on_train_start(self) -> None:
        """Say what this host alone goes by, where others do not know of it."""
        super().on_train_start()
        self._schedules = []
        schedules = self._trainer.lr_scheduler_configs if self.options.hosts is not None else ()
        if any(each.reduce_on_plateau for each in schedules):
            rank_zero_warn(
                "ReduceLROnPlateau goes by what this host has measured, so that hosts may come to train at different "
                "learning rates. Have it monitor what is the same on all, such as the loss of one validation set "
                "without shuffling, or take another schedule."
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As ever; a host of several has all data, in an order of its own."""
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs
        if (hosts := self.options.hosts) is None:
            return kwargs
        return kwargs | {"seed": zlib.crc32(hosts.name().encode())}

    # - what hosts tell each other

    def described(self) -> dict[str, str]:
        """What must be the same on all hosts beside the strategy's options and the model's parameters, as text."""
        trainer = self._trainer
        names = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
        return {name: as_text(getattr(trainer, name)) for name in names} | {
            f"optimizer {i}": f"{type(each).__name__} {as_text(each.defaults)}"
            for i, each in enumerate(self.optimizers)
        }

    def training_state(self) -> dict[str, Any]:
        """What a host that joins gets of this one's Trainer: optimizers, schedules, callbacks, and how far it is."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        saved: dict[str, Any] = {}
        callbacks = self._lasting_callbacks
        if any(_has_own(each, "on_save_checkpoint") for each in callbacks):
            saved["state_dict"] = trainer.lightning_module.state_dict()
        for each in callbacks if saved else ():
            each.on_save_checkpoint(trainer, trainer.lightning_module, saved)
        return {
            "shapes": self._shapes(),
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedulers": [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
            "callbacks": copy.deepcopy({each.state_key: each.state_dict() for each in callbacks}),
            "saved": copy.deepcopy(saved),
            "global_step": trainer.global_step,
            "batches_that_stepped": loop._batches_that_stepped,
            "epoch": trainer.current_epoch,
        }

    @torch.no_grad()
    def load_training_state(self, state: dict[str, Any]) -> None:
        """Go on as the host that returned ``state``; in the middle of an epoch that is this host's own.

        Raises:
            RuntimeError: before anything has changed, if its optimizers or schedules are others than here.
        """
        trainer, shapes = self._trainer, self._shapes()
        if shapes != state["shapes"]:
            raise RuntimeError(
                "This host must have the optimizers and schedules that the others have now; a callback, such as "
                "StochasticWeightAveraging or BackboneFinetuning, has changed theirs. Start this host from a "
                "checkpoint that one of them has saved since, with trainer.fit(..., ckpt_path=...). Host 0 is this "
                "one, host 1 another:\n  " + "\n  ".join(differences([shapes, state["shapes"]], "host"))
            )
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        for each, kept in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(kept)
        for callback in self._lasting_callbacks:
            if (kept := state["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(copy.deepcopy(kept))
            if state["saved"]:
                callback.on_load_checkpoint(trainer, trainer.lightning_module, state["saved"])
        self._go_to(state["global_step"], state["batches_that_stepped"])
        if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            epochs: Any = trainer.fit_loop.epoch_progress.current
            epochs.ready = epochs.started = epochs.processed = epochs.completed = state["epoch"]

    def _shapes(self) -> dict[str, str]:
        """What an optimizer's and a schedule's state must fit, as text by name."""
        groups = [[len(group["params"]) for group in each.param_groups] for each in self.optimizers]
        kinds = [type(each.scheduler).__name__ for each in self._trainer.lr_scheduler_configs]
        of_optimizers = {f"optimizer {i}": f"groups of {sizes} parameters" for i, sizes in enumerate(groups)}
        return of_optimizers | {f"schedule {i}": kind for i, kind in enumerate(kinds)}

    @property
    def _lasting_callbacks(self) -> list[Any]:
        """Callbacks whose state is part of the training: not of files, which each host has for itself."""
        callbacks: list[Any] = self._trainer.callbacks
        files = set(map(id, self._trainer.checkpoint_callbacks))
        lasting = ("state_dict", "on_save_checkpoint")
        return [each for each in callbacks if id(each) not in files and any(_has_own(each, name) for name in lasting)]

    # - steps

    def last_step(self) -> int:
        """The Trainer's ``max_steps``."""
        return int(self._trainer.max_steps)

    def steps_taken(self) -> int:
        """The Trainer's ``global_step``."""
        return int(self._trainer.global_step)

    def begin_step(self, counts: bool) -> None:
        """Have Lightning step schedules after a step that all hosts count, not one that this host's epoch counts."""
        step, known = self.steps_taken(), {id(each): every for each, every in self._schedules}
        self._schedules = [
            (each, known.get(id(each)) or self._every(each))
            for each in self._trainer.lr_scheduler_configs
            if each.interval == "step" and not each.reduce_on_plateau
        ]
        for each, every in self._schedules:
            each.frequency = 1 if counts and (step + 1) % every == 0 else NEVER

    def _every(self, config: Any) -> int:
        """Optimizer steps from one step of a schedule to the next; Lightning counts batches."""
        return int(config.frequency) // math.gcd(int(config.frequency), self._trainer.accumulate_grad_batches)

    def skip_steps(self, steps: int) -> None:
        """Count so many more, and have schedules go on that Lightning steps after each; they never go back."""
        before, batches = self.steps_taken(), self._trainer.fit_loop.epoch_loop._batches_that_stepped
        self._go_to(before + steps, batches + steps * batches // max(before, 1))
        if not self._trainer.lightning_module.automatic_optimization:
            return  # its own code steps schedules
        for each, every in self._schedules:
            for _ in range((before + steps) // every - before // every):
                each.scheduler.step()

    def _go_to(self, step: int, batches: int) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        steps = loop.automatic_optimization.optim_progress.optimizer.step.total
        if not self._trainer.lightning_module.automatic_optimization:
            steps = loop.manual_optimization.optim_step_progress.total
        under_way = steps.ready - steps.completed
        steps.completed = step
        steps.ready = step + under_way
        loop._batches_that_stepped = batches  # by which loggers go

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _has_own(callback: Any, method: str) -> bool:
    """Whether the class of a ``callback`` has a ``method`` that is not Lightning's own, which does nothing."""
    return any(method in vars(kind) for kind in type(callback).__mro__ if kind.__name__ != "Callback")
