"""Local steps among simulated ranks: equal to dense averaging, to DiLoCo, and to what real ranks do."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Dense, LocalSteps, SparseHook
from lightning_sparse.bench.compare.models import ByteGPT
from lightning_sparse.bench.simulate.replicas import LocalReplicas, Replicas, options_of
from lightning_sparse.bench.simulate.task import OPTIMIZERS, WEIGHT_DECAY
from lightning_sparse.options import Options
from tests.support.processes import Ranks

RANKS = 3


def model(kind: type[ByteGPT] = ByteGPT) -> ByteGPT:
    torch.manual_seed(0)
    return kind(16, 1, 2)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(100 * step + rank))


def batches(step: int, ranks: int = RANKS) -> list[tuple[Tensor]]:
    return [(batch(step, rank),) for rank in range(ranks)]


def assert_same_weights(own: ByteGPT, other: ByteGPT, atol: float) -> None:
    for (name, p), q in zip(own.named_parameters(), other.parameters(), strict=True):
        if name.endswith("in_proj_bias"):  # that of keys has no gradient but for rounding, which Adam makes steps of
            p, q = (each.view(3, -1)[[0, 2]] for each in (p, q))
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def test_averaging_all_weights_each_step_is_averaging_gradients() -> None:
    """What SGD does, with or without momentum, is linear in the gradients, so the mean of the ranks' steps is the step
    of the mean gradient; and every step starts from x̄ on every rank."""
    dense, local = model(), model()
    options = Options.of(Dense(), "bucket", local_steps=LocalSteps(1, overlap=False))
    replicas = Replicas(dense, options_of("ddp"), RANKS, "sgd"), LocalReplicas(local, options, RANKS, "sgd")
    for step in range(20):
        for each in replicas:
            each.step(batches(step), 0.1)
    assert_same_weights(local, dense, atol=1e-5)
    assert not torch.equal(dense.position, model().position)


def test_an_outer_step_of_all_weights_every_h_steps_is_diloco() -> None:
    """Algorithm 1 of Douillard et al. (2023): inner AdamW, and Nesterov's SGD on the mean of what the ranks moved."""
    shared, own = model(), model()
    settings = LocalSteps(4, 1, False, outer_rate=0.7, outer_momentum=0.9, second_moments="own")
    replicas = LocalReplicas(own, Options.of(Dense(), "bucket", local_steps=settings), RANKS)
    ranks = [deepcopy(shared) for _ in range(RANKS)]
    inner = [torch.optim.AdamW(each.parameters(), 1e-3, weight_decay=WEIGHT_DECAY) for each in ranks]
    outer = torch.optim.SGD(shared.parameters(), 0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        replicas.step(batches(step), 1e-3)
        for each, optimizer, windows in zip(ranks, inner, batches(step), strict=True):
            optimizer.zero_grad()
            each.training_step(windows).backward()
            optimizer.step()
        if (step + 1) % 4 == 0:
            for p, *of_ranks in zip(shared.parameters(), *(each.parameters() for each in ranks), strict=True):
                p.grad = torch.stack([p.detach() - q.detach() for q in of_ranks]).mean(0)
            outer.step()
            for each in ranks:
                each.load_state_dict(shared.state_dict())
    assert_same_weights(own, shared, atol=1e-5)


class _AsDDPWantsIt(ByteGPT):
    def forward(self, windows: Tensor) -> Tensor:
        return self.training_step([windows])


def real(rank: int, size: int, strategies: Sequence[str], steps: int) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    for options in map(options_of, strategies):
        ddp = DistributedDataParallel(model(_AsDDPWantsIt))
        hook = SparseHook(
            ddp,
            options.compressor,
            fusion=options.fusion,
            wire_dtype=options.wire_dtype,
            warmup_steps=options.warmup_steps,
            local_steps=options.local,
        )
        optimizer = OPTIMIZERS["adamw"](ddp.module)
        optimizer.param_groups[0]["lr"] = 1e-3
        for step in range(steps):
            optimizer.zero_grad()
            ddp(batch(step, rank)).backward()
            optimizer.step()
        hook.exchange.show_average()
        found.append({name: p.detach().clone() for name, p in ddp.module.named_parameters()})
        hook.close()
    return found


@pytest.mark.processes
def test_real_ranks_end_with_the_same_average(ranks: Ranks) -> None:
    strategies = [
        "sparse_dense:local_steps=2:wire_dtype=int4",
        "sparse_dense:local_steps=3:wire_dtype=sign",
        "micro:density=0.1:local_steps=2:warmup_steps=3",
        "sparse_dense:local_steps=2:second_moments=own",
    ]
    shared = ranks.run(real, 2, strategies, 14)[0]
    for strategy, of_real in zip(strategies, shared, strict=True):
        simulated = model()
        replicas = LocalReplicas(simulated, options_of(strategy), 2)
        for step in range(14):
            replicas.step(batches(step, 2), 1e-3)
        for name, p in simulated.named_parameters():
            assert torch.equal(p, of_real[name]), (strategy, name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "sparse_dense:local_steps=2:wire_dtype=int4"])
def test_optimizers_learn(optimizer: str, strategy: str) -> None:
    options, trained = options_of(strategy), model()
    kind: Callable[..., Any] = LocalReplicas if options.local else Replicas
    replicas = kind(trained, options, RANKS, optimizer)
    for _ in range(12):
        replicas.step(batches(0), 0.1 if optimizer == "sgd" else 3e-3)
    windows = torch.cat([windows for (windows,) in batches(0)])
    assert float(trained.training_step([windows]).detach()) < float(model().training_step([windows]).detach()) - 0.05


def test_one_rank_alone_learns_from_the_batches_of_one() -> None:
    own, other = model(), model()
    replicas = Replicas(own, options_of("ddp"), 1)
    optimizer = OPTIMIZERS["adamw"](other)
    optimizer.param_groups[0]["lr"] = 1e-3
    for step in range(3):
        replicas.step(batches(step, 1), 1e-3)
        optimizer.zero_grad()
        other.training_step([batch(step, 0)]).backward()
        optimizer.step()
    assert_same_weights(own, other, atol=0)
