"""No tensor of ours takes its dtype or device from a default of the process or of a thread: bits are those without one.

Half precision sets the default dtype while a training step runs, in which messages, local steps and measurements do.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import lightning_sparse as ls
from lightning_sparse import kernels
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.auto.trial import try_on
from lightning_sparse.fusion.costs import GroupCosts
from lightning_sparse.fusion.link import measure_link
from lightning_sparse.monitor.record import delivered_by
from lightning_sparse.network import process_groups
from lightning_sparse.network.costs import Link
from lightning_sparse.network.simulated import SimNetwork, same_bits
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.compressors import every_compressor
from tests.support.local_steps import CHOSEN, auto, local
from tests.support.models import Does, batch, data, small, trainer
from tests.support.processes import Ranks
from tests.support.sharded import Sharded, mesh
from tests.support.simulated import SimulatedRanks, normal
from tests.support.ticking import ticking

PACKAGE = Path(ls.__file__).parent


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DTYPES = ("bfloat16", "float16", "float64")
DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    **{name: lambda name=name: default_dtype(getattr(torch, name)) for name in DTYPES},  # type: ignore[misc]
    "meta": lambda: torch.device("meta"),  # as torch.set_default_device sets it, on which nothing can be computed
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
others = pytest.mark.parametrize("default", [name for name in DEFAULTS if name != "none"])


# - the text

FLOATING = ("zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace", "logspace", "eye", "normal")
PLACED = (*FLOATING, "as_tensor", "asarray", "arange", "randint", "randperm", "scalar_tensor", "empty_strided")


def test_every_tensor_that_is_made_says_of_which_dtype_and_on_which_device() -> None:
    """But in ``bench``, which is a process of its own."""
    unsaid = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if "bench" in path.parts or not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            said = {each.arg for each in node.keywords}
            if name in PLACED and ("device" not in said or (name in FLOATING and "dtype" not in said)):
                unsaid.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert unsaid == []


# - simulated ranks


def steps(compressor: ls.Compressor, wire_dtype: str, default: str) -> list[Tensor]:
    """The means of some steps of matrices and vectors, and what is left, with a default while they are taken."""
    given = normal(3, 3, 30 * 19 + 30)
    network = SimNetwork(3, WIRE_DTYPES[wire_dtype])
    ranks = SimulatedRanks(compressor, 3, normal(30, 19, seed=1), 30, network=network)
    with DEFAULTS[default]():
        return [*(ranks.mean(gradients) for gradients in given), *(group.unsent for group in ranks.groups)]


@every_compressor
@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_of_a_compressor_has_the_same_bits(
    compressor: ls.Compressor, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(kernels, "used_for", lambda x: True)
    for wire_dtype in ("float32", "int4", "sign") if on_device else WIRE_DTYPES:
        plain = steps(compressor, wire_dtype, "none")
        for default in DEFAULTS:
            same = map(same_bits, steps(compressor, wire_dtype, default), plain)
            assert all(same), (wire_dtype, default)


@pytest.mark.parametrize("candidate", [*CANDIDATES, ls.Candidate(ls.LowRank(), "int4", 2)], ids=str)
def test_a_candidate_that_is_tried_promises_the_same(candidate: ls.Candidate) -> None:
    gradients, weights, of = normal(3, 4, 600), normal(600, seed=1), {"layer": torch.empty(100, 40)}
    found = []
    for default in DEFAULTS.values():
        with default():
            error = try_on(candidate, gradients, weights)
            seconds = GroupCosts(of, Link(0.001, 1e-9, 0.002), 3, now=ticking()).sums_s(candidate.averaging)
        found.append((error.delivered, error.staleness, seconds))
    assert found == [found[0]] * len(found)


@others
def test_a_simulation_has_the_same_bits(default: str) -> None:
    given = normal(3, 2, 100)
    plain = ls.simulate("micro", given)
    with DEFAULTS[default]():
        other = ls.simulate("micro", given)
    for field in dataclasses.fields(plain):
        assert same_bits(getattr(plain, field.name), getattr(other, field.name)), field.name


# - whole steps


class Adam(torch.optim.Optimizer):
    """Divides by the root of a mean of squares, and makes no tensor that a default changes."""

    def __init__(self, params: Any, lr: float = 0.05, betas: tuple[float, float] = (0.9, 0.9)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                v.mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=1 - group["betas"][1])
                p.addcdiv_(p.grad, v.sqrt().add_(1e-3), value=-group["lr"])


class Loss(nn.Module):
    """The loss of a classifier, as it is without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = small().net, nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.cross_entropy(self.net(self.norm(x)), y)


ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "micro": (ls.MiCRO(density=0.2), {"wire_dtype": "int4"}),
    "low_rank": (ls.LowRank(rank=2), {"wire_dtype": "int8"}),
    "ok_topk": (ls.OkTopk(density=0.2), {}),
    "loss scale": (ls.TopK(density=0.2), {"scaler": 8.0}),
    "local steps, sparse_topk": (ls.TopK(density=0.2), {"local_steps": 2, "wire_dtype": "int4"}),
    "local steps, low_rank": (ls.LowRank(rank=2), {"local_steps": 2}),
    "local steps, sign": (ls.Dense(), {"local_steps": 2, "wire_dtype": "sign"}),
}


def train(rank: int, engine: str, default: str, by_nccl: bool) -> list[Tensor]:
    """Some steps, a look at what is unsent, a checkpoint and a resume; by the rules of NCCL all in this thread."""
    ddp = DistributedDataParallel(Loss())
    optimizer, batches = Adam(ddp.parameters()), [batch(step, rank) for step in range(12)]
    compressor, options = ENGINES[engine]
    scaler = torch.amp.GradScaler("cpu", init_scale=options.get("scaler", 1.0)) if "scaler" in options else None

    def take_steps(first: int, last: int) -> None:
        for x, y in batches[first:last]:
            optimizer.zero_grad()
            loss = ddp(x, y)
            with torch.autocast("cpu", enabled=False):
                (scaler.scale(loss) if scaler else loss).backward()
            optimizer.step()

    with patch.object(process_groups, "carries_by_nccl", lambda *_: by_nccl), DEFAULTS[default]():
        hook = ls.SparseHook(ddp, compressor, **(options | ({"scaler": scaler} if scaler else {})))
        hook.averager.watch_unsent()
        take_steps(0, 7)
        saved = [hook.state_dict(optimizers=[optimizer])]
    dist.broadcast_object_list(saved, 0)
    with DEFAULTS[default]():
        take_steps(7, 9)
        hook.load_state_dict(saved[0], [optimizer])
        take_steps(9, 12)
        delivered = delivered_by(hook.averager)
        hook.show_average()
        assert measure_link(hook.averager).latency_s > 0
        hook.close()
    kept = [x for x in tree_leaves(saved) if isinstance(x, Tensor)]
    return [x.detach().reshape(-1).clone() for x in (*ddp.parameters(), *ddp.buffers(), *kept, torch.tensor(delivered))]


def train_all(rank: int, size: int) -> list[str]:
    """Each engine with each default; returns those whose bits are others than without a default."""
    others = []
    for engine in ENGINES:
        for by_nccl in (False, True):
            plain = train(rank, engine, "none", by_nccl)
            for default in DEFAULTS if by_nccl else ("bfloat16",):
                if not all(map(same_bits, train(rank, engine, default, by_nccl), plain)):
                    others.append(f"{engine}, {default}{', by NCCL' if by_nccl else ''}")
    return others


@pytest.mark.programs
def test_whole_steps_have_the_same_bits(ranks: Ranks) -> None:
    assert ranks.run(train_all, 2, gloo=True) == [[], []]


# - sharded models


def within(default: str, function: Callable[..., Any]) -> Any:
    """Have ``function`` be called with a default."""

    def call(*args: Any) -> Any:
        with DEFAULTS[default]():
            return function(*args)

    return call


def train_sharded(rank: int, size: int) -> list[str]:
    """Some steps, all with a default dtype; with other defaults what is ours of them."""
    of_all, others = mesh(2, 2), []
    for compressor, wire_dtype in ((ls.TopK(density=0.2), "int4"), (ls.LowRank(rank=1), "float32")):
        plain: Tensor | None = None
        for default in DEFAULTS:
            training = Sharded(of_all, compressor, wire_dtype=wire_dtype)
            for name in ("_hand_over", "_end_backward"):
                setattr(training.sharded, name, within(default, getattr(training.sharded, name)))
            with DEFAULTS[default]() if default in DTYPES else nullcontext():
                for step in range(3):
                    training.step(step)
            plain = training.weights if plain is None else plain
            if not same_bits(training.weights, plain):
                others.append(f"{compressor}, {default}")
            training.close()
    return others


@pytest.mark.programs
def test_sharded_models_have_the_same_bits(ranks: Ranks) -> None:
    assert ranks.run(train_sharded, 4, gloo=True) == [[]] * 4


# - Lightning's loop, in which sparse_auto measures and chooses


def fit(rank: int, size: int, kind: str, dtype: str) -> tuple[Tensor, set[str]]:
    """The weights after a training whose steps have a default, and the types of all that was sent in them."""
    sent: set[str] = set()
    launch = TorchComm._all_reduce

    def noting(comm: TorchComm, x: Tensor, direct: bool) -> Any:
        sent.add(str(x.dtype))
        return launch(comm, x, direct)

    before = torch.get_default_dtype()
    begins = Does("on_train_batch_start", lambda run: torch.set_default_dtype(getattr(torch, dtype)))
    ends = Does("on_train_batch_end", lambda run: torch.set_default_dtype(before))
    strategy = auto() if kind == "sparse_auto" else local(ls.TopK(density=0.2))
    module = small(optimizer="adam")
    run = trainer(
        strategy, size, max_steps=CHOSEN + 8, max_epochs=-1, callbacks=[begins, ends, ls.CompressionMonitor()]
    )
    with patch.object(TorchComm, "_all_reduce", noting):
        run.fit(module, data(8, size))
    moments = strategy.averager.local.state().get("moments", {})  # type: ignore[union-attr]
    assert all(x.dtype != getattr(torch, dtype) for x in moments.values() if dtype != "float32")
    assert moments
    return torch.cat([p.detach().flatten() for p in module.parameters()]), sent


def fit_all(rank: int, size: int) -> list[tuple[str, str, bool, set[str]]]:
    found = []
    for kind in ("local steps", "sparse_auto"):
        for dtype in ("float32", *DTYPES):
            weights, sent = fit(rank, size, kind, dtype)
            if dtype == "float32":
                plain = weights
            found.append((kind, dtype, kind == "sparse_auto" or same_bits(weights, plain), sent))
    return found


@pytest.mark.programs
def test_trainings_of_the_trainer_send_no_other_types(ranks: Ranks) -> None:
    """What ``sparse_auto`` chooses goes by time, and groups by that; so only types are compared."""
    for each in ranks.run(fit_all, 2):
        plain = {kind: sent for kind, dtype, _, sent in each if dtype == "float32"}
        for kind, dtype, same, sent in each:
            assert same, (kind, dtype)
            assert sent == plain[kind], (kind, dtype)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_local_steps_train_in_half_precision(ranks: Ranks, precision: str) -> None:
    ranks.run(fit_halves, 2, precision)


def fit_halves(rank: int, size: int, precision: Any) -> None:
    for compressor in (ls.TopK(density=0.2), ls.OkTopk(density=0.2), ls.LowRank(rank=2)):
        module = Half()
        trainer(local(compressor, 2), size, max_steps=6, max_epochs=-1, precision=precision).fit(module, data(8, size))
        assert all(p.isfinite().all() for p in module.parameters())


class Half(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small().net

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0].to(self.dtype)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)
