from __future__ import annotations

import pytest
import torch

from lightning_sparse.bench.compare import workloads
from lightning_sparse.bench.compare.workloads import WORKLOADS, count_parameters, workload_named


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("mlp_25m", 24e6, 26e6), ("gpt_3m", 2e6, 5e6), ("gpt_10m", 9e6, 11e6), ("gpt_50m", 47e6, 52e6)],
)
def test_models_have_about_the_size_in_their_name(name: str, least: float, most: float) -> None:
    assert least < count_parameters(WORKLOADS[name]) < most


@pytest.mark.parametrize("name", ["mlp_1m", "gpt_10m"])
def test_a_step_gives_every_parameter_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    workload = workload_named(name)
    module = workload.module()
    batch = next(iter(workload.fit_arguments()["train_dataloaders"]))
    loss = module.training_step(batch)
    loss.backward()
    assert torch.isfinite(loss)
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_a_mlp_learns_the_digits() -> None:
    torch.manual_seed(0)
    workload = workload_named("mlp_1m")
    module = workload.module()
    optimizer = module.configure_optimizers()
    dataset = workload.fit_arguments()["train_dataloaders"].dataset
    images, labels = dataset[:64]
    losses = []
    for _ in range(30):
        loss = module.training_step([images, labels])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_byte_lm_trains_as_the_simulation_does() -> None:
    torch.manual_seed(3)
    workload = workload_named("byte_lm")
    module, held_out = workload.module(), workload.held_out and workload.held_out()
    batches = iter(workload.fit_arguments()["train_dataloaders"])
    simulated = workloads.byte_lm(3)
    assert all(map(torch.equal, module.parameters(), simulated.model.parameters()))
    assert held_out is not None
    assert torch.equal(held_out, simulated.validation[0][::2])
    for step in range(2):
        assert torch.equal(next(batches)[0], simulated.batch(3, step, 0)[0])
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["weight_decay"] == 0.01  # as docs/benchmarks/simulate.py


def test_learning_rates_of_byte_lm_depend_on_the_step_alone() -> None:
    assert workloads.schedule(59, 600) == 1
    assert workloads.schedule(299, 600) == workloads.learning_rate(1, 299, 600) < 1
    assert workloads.schedule(0, -1) == 1 / 60  # by the clock: a warm-up, and no end in sight
    assert workloads.schedule(60, -1) == workloads.schedule(10_000, -1) == 1


def test_unknown_workload_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"a workload must be one of mlp_1m, mlp_25m.*; got 'mlp'"):
        workload_named("mlp")


def test_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package scikit-learn.*pip install scikit-learn"):
        workload_named("mlp_1m")
    workload_named("gpt_10m")
