"""A Trainer made up of what the monitor looks at, without processes."""

from types import SimpleNamespace
from typing import Any

import torch

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.bucket import Report
from lightning_sparse.engine.observers import Sample
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.network.cut import WHOLE


class Unread(int):
    """A number that a device has not computed yet, as far as the monitor can tell; counts who asks for it."""

    asked = 0

    def __float__(self) -> float:
        Unread.asked += 1
        return float(int(self))


class Averager:
    """Two groups whose steps cost what they are given."""

    def __init__(self, elements: int = 600) -> None:
        self.device = torch.device("cpu")
        self.rank = 0
        self.steps = 0
        self.last: Report | None = None
        self.sample: Sample | None = None
        self.watch_unsent = lambda: setattr(self, "sample", Sample(self.groups))
        self.timeline = Timeline(self.device)
        parameters = {name: torch.zeros(elements // 2) for name in ("head.weight", "body.weight")}
        self.groups = [Group(i, (name,), (p,)) for i, (name, p) in enumerate(parameters.items())]
        self.cut = WHOLE
        self.norms_asked = 0
        halves = torch.tensor([[1.0], [0.5]])  # of what is unsent before a step, and after it
        self.lanes = SimpleNamespace(sum_over_members=lambda sums: halves)

    def step(self, sent_bytes: int = 100) -> None:
        self.timeline.begin_backward()
        for group in self.groups:
            self.timeline.arrive(group.parameters)
            self.timeline.average(group, self.timeline.now(), 0.0)
            group.picked, group.target = Unread(12), 10
        elements = sum(group.n for group in self.groups)
        self.last = Report(sent_bytes, 8 * elements, elements, Unread(24), 20, 0, 0, 1.0, 2.0, 3.0)
        self.steps += 1

    def metrics(self) -> dict[str, float]:
        return {}

    def unsent_of(self, group: Group) -> torch.Tensor:
        return group.unsent

    def unsent_norm(self) -> float:
        self.norms_asked += 1
        return float(torch.stack([group.unsent.norm() for group in self.groups]).norm())


class Logger:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


class Training:
    """A Trainer's hooks in Lightning's order."""

    def __init__(self, monitor: ls.CompressionMonitor, every: int = 5, **trainer: Any) -> None:
        self.monitor = monitor
        self.averager = Averager()
        self.loggers = [Logger(), Logger()]
        self.trainer: Any = SimpleNamespace(
            **{
                "strategy": SimpleNamespace(
                    averager=self.averager,
                    layer_fusion=None,
                    broadcast=lambda own: own,
                    options=ls.SparseDDPStrategy("micro").options,
                ),
                "log_every_n_steps": every,
                "loggers": self.loggers,
                "callback_metrics": {},
                "progress_bar_metrics": {},
                "progress_bar_callback": None,
                "fit_loop": SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
                "accumulate_grad_batches": 1,
                "is_global_zero": True,
                "global_rank": 0,
                "current_epoch": 0,
                "fast_dev_run": False,
            }
            | trainer
        )
        self.module: Any = SimpleNamespace(log_dict=self.log_dict)

    def log_dict(self, metrics: dict[str, float], **how: Any) -> None:
        assert how["logger"] is False  # the monitor gives them to loggers itself
        self.trainer.callback_metrics.update(metrics)

    def start(self) -> None:
        self.monitor.on_train_start(self.trainer, self.module)
        self.monitor.on_train_epoch_start(self.trainer, self.module)

    def batch(self, steps: int = 1, loss: float = 1.0) -> None:
        self.monitor.on_train_batch_start(self.trainer, self.module, None, 0)
        for _ in range(max(steps, 1)):
            if steps:
                self.averager.step()
            self.monitor.on_after_backward(self.trainer, self.module)
        self.monitor.on_train_batch_end(self.trainer, self.module, {"loss": torch.tensor(loss)}, None, 0)
        if steps:
            self.trainer.fit_loop.epoch_loop._batches_that_stepped += 1

    def run(self, batches: int) -> "Training":
        self.start()
        for _ in range(batches):
            self.batch()
        self.end()
        return self

    def end(self) -> None:
        self.monitor.on_train_epoch_end(self.trainer, self.module)
        self.monitor.on_fit_end(self.trainer, self.module)


def quiet(**options: Any) -> ls.CompressionMonitor:
    return ls.CompressionMonitor(**({"table": False, "summary": False} | options))
