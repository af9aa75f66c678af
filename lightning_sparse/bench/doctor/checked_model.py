"""A model that checks in each of its steps what every strategy promises."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.bench.compare.models import Classifier
from lightning_sparse.engine.averager import Averager
from lightning_sparse.monitor.callbacks import check_replicas
from lightning_sparse.network.torch_comm import world

TOLERANCE = 1e-5  # of the largest element: sums in float32 are rounded
INPUTS, WIDTH, CLASSES = 64, 384, 10
BATCH, BATCHES = 16, 100


class CheckedModel(Classifier):
    """Layers of 176,266 parameters that learn made-up classes; a step that breaks a promise raises an error.

    After each backward, over all P ranks and for each parameter,
    ``P * mean + sum(unsent after) == sum(unsent before + gradient)``; after each step every rank has the same
    parameters, bit for bit.  With local steps, where no gradients are averaged, the second is true of the average.
    """

    def __init__(self) -> None:
        widths = (INPUTS, WIDTH, WIDTH, CLASSES)
        layers = [each for n, m in pairwise(widths) for each in (nn.Linear(n, m), nn.ReLU())]
        super().__init__(layers[:-1], learning_rate=0.05)
        self._gradients: dict[str, Tensor] = {}  # this rank's own, of the last backward
        self._before: dict[str, Tensor] = {}  # what was unsent before it
        self._checked = 0

    def train_dataloader(self) -> DataLoader[Any]:
        """Inputs whose largest element among the first ten says the class; each rank gets batches of its own."""
        generator = torch.Generator().manual_seed(0)
        size = BATCH * BATCHES * self.trainer.world_size
        inputs = torch.randn(size, INPUTS, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), BATCH)

    def on_train_start(self) -> None:
        """Watch for each parameter's own gradient, before it is averaged."""
        for name, parameter in self.named_parameters():
            parameter.register_hook(partial(self._note, name))

    def on_before_backward(self, loss: Tensor) -> None:
        """Keep what is unsent."""
        del loss
        self._before = self._unsent()

    def on_after_backward(self) -> None:
        """Check what has been averaged."""
        if self._exchange and self._exchange.local is not None:
            return
        after, parameters = self._unsent(), dict(self.named_parameters())
        before = {name: self._before[name] + self._gradients[name].double() for name in parameters}
        total = torch.cat([(after[name] - before[name]).flatten() for name in parameters]).float()
        dist.all_reduce(total)  # one message: over the ranks, -P * mean
        parts = total.split([p.numel() for p in parameters.values()])
        for (name, parameter), part in zip(parameters.items(), parts, strict=True):
            assert parameter.grad is not None
            mean = self.trainer.world_size * parameter.grad.flatten()
            wrong = float((part + mean).abs().max() / (before[name].abs().max() + mean.abs().max()).clamp(min=1e-30))
            if not wrong <= TOLERANCE:
                raise RuntimeError(
                    f"gradient was lost or made up in step {self.trainer.global_step + 1}: P * mean + sum(unsent "
                    f"after) must be sum(unsent before + gradient); for {name} it is {wrong:.1e} of the largest "
                    "element away from it. Please report it, with all that this command prints."
                )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check that the replicas are equal."""
        del outputs, batch, batch_idx
        local = self._exchange.local if self._exchange else None
        shared = local.compared() if local else {}
        check_replicas({name: shared.get(p, p) for name, p in self.named_parameters()}, world())
        self._checked += 1

    def on_train_end(self) -> None:
        """Check that every step was checked."""
        if self._checked != self.trainer.max_steps:
            raise RuntimeError(f"{self.trainer.max_steps} steps must be checked; {self._checked} were.")

    @property
    def _exchange(self) -> Averager | None:
        return getattr(self.trainer.strategy, "exchange", None)

    def _note(self, name: str, gradient: Tensor) -> None:
        self._gradients[name] = gradient.detach().clone()

    def _unsent(self) -> dict[str, Tensor]:
        """What this rank has not sent of each parameter, in float64 and of its shape; zeros where nothing is kept."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # groups are averaged on a stream of their own
        unsent = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named_parameters()}
        for group in self._exchange.groups if self._exchange else ():
            for name, parameter, slot in zip(group.names, group.parameters, group.slots(group.unsent), strict=True):
                unsent[name] = slot.detach().double().view(parameter.shape)
        return unsent
