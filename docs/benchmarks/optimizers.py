"""Trains a small byte language model with each optimizer under each strategy; prints a table of held-out losses.

    python docs/benchmarks/optimizers.py [NAME ...]

Columns: one rank alone, ddp, then by how much each strategy ends above ddp.  Two ranks on a CPU, the same steps
everywhere.  Optimizers of packages that are not installed are left out: schedulefree and torchao.
"""

import logging
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls

CONTEXT, WIDTH, BATCH, STEPS, RANKS = 16, 512, 32, 300, 2
Make = Callable[[nn.Module], Sequence[optim.Optimizer]]


class Lion(optim.Optimizer):
    """Chen and others, arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - group["betas"][1])
        return loss


def one(kind: Any, **settings: Any) -> Make:
    """One optimizer for all parameters."""
    return lambda module: [kind(module.parameters(), **settings)]


def muon(module: nn.Module) -> Sequence[optim.Optimizer]:
    """Muon for the matrices between layers, AdamW for the rest."""
    matrices = [module.net[1].weight, module.net[3].weight]  # type: ignore[index, union-attr]
    rest = [p for p in module.parameters() if all(p is not each for each in matrices)]
    return [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=1e-3)]


OPTIMIZERS: dict[str, Make] = {
    "SGD, momentum": one(optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": one(optim.AdamW, lr=1e-3, foreach=False),
    "AdamW, fused": one(optim.AdamW, lr=1e-3, fused=True),
    "AdamW, foreach": one(optim.AdamW, lr=1e-3, foreach=True),
    "NAdam": one(optim.NAdam, lr=1e-3),
    "Adafactor": one(optim.Adafactor, lr=0.01),
    "RMSprop": one(optim.RMSprop, lr=3e-4),
    "Adagrad": one(optim.Adagrad, lr=0.01),
    "Lion": one(Lion, lr=1e-4),
    "Muon beside AdamW": muon,
    "LBFGS": one(optim.LBFGS, lr=0.05, max_iter=4, history_size=10, tolerance_change=0),
}
try:
    from schedulefree import AdamWScheduleFree

    OPTIMIZERS["schedule-free AdamW"] = one(AdamWScheduleFree, lr=3e-3)
except ImportError:
    pass
try:
    from torchao.optim import AdamW8bit

    OPTIMIZERS["AdamW, 8 bits (torchao)"] = one(AdamW8bit, lr=3e-4)
except ImportError:
    pass

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "int4": lambda: ls.SparseDDPStrategy("sparse_dense", wire_dtype="int4"),
    "micro": lambda: ls.SparseDDPStrategy("micro"),
    "2 local steps": lambda: ls.SparseDDPStrategy("sparse_dense", wire_dtype="int4", local_steps=2),
    "4 local steps": lambda: ls.SparseDDPStrategy("sparse_dense", wire_dtype="int4", local_steps=4),
    "sparse_auto": lambda: ls.SparseDDPStrategy(ls.Auto([ls.Candidate(ls.Dense(), "int4", 2)])),
}


class Model(L.LightningModule):
    """The next byte of sixteen."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.embedding = nn.Embedding(256, 64)
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * CONTEXT, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, 256),
        )  # fmt: skip

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.embedding(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        made = self.make(self)
        self.automatic_optimization = len(made) == 1
        return list(made)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor | None:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        return None

    def set_mode(self, mode: str) -> None:
        for optimizer in self.trainer.optimizers:
            getattr(optimizer, mode, lambda: None)()

    def on_train_batch_start(self, *_: Any) -> None:
        self.set_mode("train")

    def on_train_end(self) -> None:
        self.set_mode("eval")


def contexts(steps: int) -> tuple[TensorDataset, TensorDataset]:
    """Contexts and next bytes of the standard library's source, for so many steps, and of other files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    generator, sets = torch.Generator().manual_seed(0), []
    for part, n in ((files[::2], steps * BATCH * RANKS), (files[1::2], 8192)):
        text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in part)), dtype=torch.uint8).long()
        starts = torch.randint(len(text) - CONTEXT, (n,), generator=generator)
        rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        sets.append(TensorDataset(rows[:, :-1], rows[:, -1]))
    return sets[0], sets[1]


def alone(make: Make, data: TensorDataset, held_out: TensorDataset) -> float:
    """The held-out loss of one rank that trains by itself."""
    model, loader = Model(make), DataLoader(data, batch_size=BATCH)
    optimizers = model.make(model)
    for _, batch in zip(range(STEPS), loader, strict=False):
        for optimizer in optimizers:
            getattr(optimizer, "train", lambda: None)()

        def closure(batch: Sequence[Tensor] = batch) -> Tensor:
            model.zero_grad()
            loss = model.loss(batch)
            loss.backward()
            return loss

        closure()
        for optimizer in optimizers:
            optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)  # type: ignore[arg-type]
    for optimizer in optimizers:
        getattr(optimizer, "eval", lambda: None)()
    with torch.no_grad():
        return float(model.loss(held_out.tensors))


def run(make: Make, strategy: Any, data: TensorDataset, held_out: TensorDataset) -> tuple[float | None, bool]:
    """The held-out loss after so many steps, None where it is refused; and whether local steps were taken."""
    model = Model(make)
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=STEPS * len(make(model)), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(model, DataLoader(data, batch_size=BATCH))
    except ValueError as error:
        if "local_steps cannot be combined with" not in str(error):
            raise
        return None, False
    with torch.no_grad():
        losses = [torch.empty(()) for _ in range(RANKS)]
        dist.all_gather(losses, model.loss(held_out.tensors))
    assert len(set(map(str, losses))) == 1, losses
    return float(losses[0]), getattr(getattr(trainer.strategy, "averager", None), "local", None) is not None


def main() -> None:
    """Print a row for each optimizer."""
    warnings.filterwarnings("ignore")
    for name in list(logging.root.manager.loggerDict):
        if "lightning" in name:
            logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    data, held_out = contexts(STEPS)
    for name in sys.argv[1:] or OPTIMIZERS:
        cells: list[str] = []
        for each, strategy in STRATEGIES.items():
            loss, is_local = run(OPTIMIZERS[name], strategy(), data, held_out)
            if each == "ddp":
                assert loss is not None
                dense = loss
                cells = [f"{alone(OPTIMIZERS[name], data, held_out):.3f}", f"{loss:.3f}"]
            elif loss is None:
                cells.append("refused")
            else:
                sums = " (gradients)" if each == "sparse_auto" and not is_local else ""
                cells.append(f"{100 * (loss / dense - 1):+.1f} %{sums}")
        if dist.get_rank() == 0:
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
