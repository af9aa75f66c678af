"""One host of an elastic training under a Trainer: its data, and what it gets when it joins others."""

import copy
import math
import sys
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.checks import class_names
from lightning_sparse.network.agreement import differences
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.settings import as_text
from lightning_sparse.trainer.shown_average import WEIGHT_AVERAGING

NEVER = sys.maxsize  # batches from one step of a schedule to the next


class ElasticHost:
    """The Trainer of one of several ``hosts``: what its averager, which meets the others, is part of (``Training``).

    A strategy makes one for each fit, on every rank of the host, and holds it.  It knows the ``trainer`` weakly, since
    a Trainer holds its strategy, and the averager keeps this host after the fit.

    Attributes:
        name: of this host, the same on all its ranks.

    Raises:
        ValueError: something needs to see all hosts.
    """

    def __init__(self, trainer: Any, hosts: Elastic) -> None:
        _check(trainer, hosts)
        self._owner, self._hosts = weakref.ref(trainer), hosts
        self.name: str = trainer.strategy.broadcast(hosts.name())
        self._schedules: Sequence[tuple[Any, int]] = ()  # those that go by steps, and their frequencies as given

    @property
    def _trainer(self) -> Any:
        trainer = self._owner()
        assert trainer is not None
        return trainer

    def warn_of_own_schedules(self) -> None:
        """Say what this host alone goes by, where others do not know of it; to be called when training starts."""
        schedules = self._trainer.lr_scheduler_configs
        if self._hosts.own_pace and any(each.interval == "epoch" for each in schedules):
            rank_zero_warn(
                "lightning_sparse: With own_pace=True each host has epochs of its own, so a schedule that goes by "
                "epochs has them train at different learning rates. Give it interval='step'."
            )
        if any(each.reduce_on_plateau for each in schedules):
            rank_zero_warn(
                "lightning_sparse: ReduceLROnPlateau goes by what this host has measured, so that hosts may come to "
                "train at different learning rates. Have it monitor what is the same on all, such as the loss of one "
                "validation set without shuffling, or take another schedule."
            )

    # - what hosts tell each other

    def described(self) -> dict[str, str]:
        """What must be the same on all hosts beside the strategy's options and the model's parameters, as text."""
        trainer = self._trainer
        names = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
        return {name: as_text(getattr(trainer, name)) for name in names} | {
            f"optimizer {i}": f"{type(each).__name__} {as_text(each.defaults)}"
            for i, each in enumerate(trainer.optimizers)
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
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers],
            "schedulers": [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
            "callbacks": copy.deepcopy({each.state_key: each.state_dict() for each in callbacks}),
            "saved": copy.deepcopy(saved),
            "global_step": trainer.global_step,
            "batches_that_stepped": loop._batches_that_stepped,
            "progress": [each.processed for each in self._progress],
        }

    @torch.no_grad()
    def load_training_state(self, state: dict[str, Any]) -> None:
        """Go on as the host that returned ``state``, at its place in its epoch, with this host's own data.

        Raises:
            RuntimeError: before anything has changed, if its optimizers or schedules are others than here.
        """
        trainer, shapes = self._trainer, self._shapes()
        if shapes != state["shapes"]:
            raise RuntimeError(
                "This host must have the optimizers and schedules that the others have now; a callback, such as "
                "StochasticWeightAveraging or BackboneFinetuning, may have changed theirs. Then start all hosts again "
                "from a checkpoint that one of them has saved, with trainer.fit(..., ckpt_path=...). Host 0 is this "
                "one, host 1 another:\n  " + "\n  ".join(differences([shapes, state["shapes"]], "host"))
            )
        for optimizer, kept in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        for each, kept in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(kept)
        for callback in self._lasting_callbacks:
            if (kept := state["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(kept)
            if state["saved"]:
                callback.on_load_checkpoint(trainer, trainer.lightning_module, state["saved"])
        has_begun = self._progress[0].processed > 0
        self._go_to(state["global_step"], state["batches_that_stepped"])
        for each, processed in zip(self._progress, state["progress"], strict=True):
            further = processed - each.processed
            each.ready, each.started = each.ready + further, each.started + further
            each.processed, each.completed = each.processed + further, each.completed + further
        if has_begun and (fetcher := trainer.fit_loop._data_fetcher) is not None:
            iter(fetcher)  # from the beginning, since more may be left of the epoch than of the data
            batches = trainer.fit_loop.epoch_loop.batch_progress
            batches.is_last_batch = batches.current.ready >= trainer.num_training_batches

    def _shapes(self) -> dict[str, str]:
        """What an optimizer's and a schedule's state must fit, and averages that nobody can load, as text by name."""
        trainer = self._trainer
        names = {p: name for name, p in trainer.lightning_module.named_parameters()}
        groups = [[[names.get(p, "") for p in x["params"]] for x in each.param_groups] for each in trainer.optimizers]
        schedules = trainer.lr_scheduler_configs
        of_optimizers = {
            f"optimizer {i}": f"groups of {[len(x) for x in each]} parameters, the first of which are "
            f"{[x[0] for x in each if x]}; checksum of all {zlib.crc32(repr(each).encode()):08x}"
            for i, each in enumerate(groups)
        }
        averaging = [each for each in trainer.callbacks if "StochasticWeightAveraging" in class_names([each])]
        of_averages = {each.state_key: f"the average of {int(each.n_averaged or 0)} epochs" for each in averaging}
        of_schedules = {
            f"schedule {i}": f"{type(x.scheduler).__name__}, every {self._frequency(x)} of interval='{x.interval}'"
            for i, x in enumerate(schedules)
        }
        return of_optimizers | of_averages | of_schedules

    @property
    def _progress(self) -> list[Any]:
        """Where the Trainer counts batches and epochs, between which a joining host goes on."""
        loop = self._trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        return [batches.current, batches.total, loop.epoch_progress.current]

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
        configs = self._trainer.lr_scheduler_configs
        by_step = [each for each in configs if each.interval == "step" and not each.reduce_on_plateau]
        self._schedules = [(each, self._frequency(each)) for each in by_step]
        for each, every in self._every:
            each.frequency = 1 if counts and (self.steps_taken() + 1) % every == 0 else NEVER

    def has_failed(self) -> bool:
        """Whether it has ended, on this rank, with an error."""
        trainer = self._owner()
        return trainer is not None and trainer.strategy.shown_average.others_may_be_gone()

    def _frequency(self, config: Any) -> int:
        """The frequency that a user gave."""
        return next((given for each, given in self._schedules if each is config), int(config.frequency))

    @property
    def _every(self) -> list[tuple[Any, int]]:
        """Optimizer steps from one step of each schedule to the next; Lightning counts batches."""
        batches = self._trainer.accumulate_grad_batches
        return [(each, given // math.gcd(given, batches)) for each, given in self._schedules]

    def skip_steps(self, steps: int) -> None:
        """Count so many more, and have schedules go on that Lightning steps after each; they never go back."""
        before, batches = self.steps_taken(), self._trainer.fit_loop.epoch_loop._batches_that_stepped
        self._go_to(before + steps, batches + steps * batches // max(before, 1))
        if not self._trainer.lightning_module.automatic_optimization:
            return  # its own code steps schedules
        for each, every in self._every:
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


def own_order(name: str) -> dict[str, Any]:
    """What a sampler is given on one of several hosts, of this ``name``: each has all data, in an order of its own."""
    return {"seed": zlib.crc32(name.encode())}


def check_one_machine(num_nodes: int) -> None:
    """Raise a ValueError if the training of a host is on several machines, before one waits for another."""
    if num_nodes != 1:
        raise ValueError(
            f"with elastic every machine must be a training of its own; got num_nodes={num_nodes}. Give the Trainer "
            "num_nodes=1 and the machine's devices, and start it on each machine; with torchrun by --standalone."
        )


def _check(trainer: Any, hosts: Elastic) -> None:
    """Raise a ValueError for what needs to see all hosts."""
    norms = any(isinstance(each, torch.nn.SyncBatchNorm) for each in trainer.lightning_module.modules())
    if norms and trainer.world_size == 1:
        raise ValueError(
            "SyncBatchNorm cannot be combined with elastic where a host has one device: it sees the ranks of one "
            "training, and hosts are trainings of their own. Leave out sync_batchnorm=True, or the conversion of your "
            "own."
        )
    kinds = class_names(trainer.callbacks)
    if hosts.own_pace and (found := kinds & WEIGHT_AVERAGING):
        raise ValueError(
            f"{found.pop()} cannot be combined with own_pace=True: each host would average at own steps, and "
            "wait for the others at each. Give Elastic(own_pace=False)."
        )
    if "LearningRateFinder" in kinds:
        raise ValueError(
            "LearningRateFinder cannot be combined with elastic: each host would find another rate. Find one "
            "without elastic, and give it to all hosts."
        )


def _has_own(callback: Any, method: str) -> bool:
    """Whether the class of a ``callback`` has a ``method`` that is not Lightning's own, which does nothing."""
    return any(method in vars(kind) for kind in type(callback).__mro__ if kind.__name__ != "Callback")
