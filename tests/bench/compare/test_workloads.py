from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from lightning_sparse.bench.compare import worker, workloads
from lightning_sparse.bench.compare.ranks import RankInfo, Turn
from lightning_sparse.bench.compare.records import MeasuredRun
from lightning_sparse.bench.compare.schedule import COMPILING, Schedule
from lightning_sparse.bench.compare.strategies import parse_strategies
from lightning_sparse.bench.compare.workloads import (
    GPT,
    TEXT_BYTES,
    WORKLOADS,
    count_parameters,
    source_text,
    workload_named,
)
from tests.support.processes import LIMIT_S, Ranks


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


def test_gpt_124m_is_gpt_2_small() -> None:
    assert count_parameters(WORKLOADS["gpt_124m"]) == 124_439_808


def test_tokens_are_of_the_training_text_and_spell_any_other() -> None:
    tokens = list(workloads.vocabulary())
    assert 10_000 < len(tokens) <= workloads.TOKENS
    rare = b"    colourless_green = b'\xff\x00' # \t\r\n"
    for text in (source_text(20_000), source_text(2 * TEXT_BYTES)[-20_000:], rare * 100):
        windows = workloads.token_windows(text)
        assert torch.equal(windows[1:, 0], windows[:-1, -1])  # the last to be said is the first to be read next
        spelt = b"".join(tokens[n] for n in [int(windows[0, 0]), *windows[:, 1:].flatten().tolist()])
        assert text.startswith(spelt)
        assert len(spelt) > len(text) / 2
    held_out = {bytes(window.numpy()) for window in workloads.other_tokens()}
    assert len(held_out) == workloads.HELD_OUT_OF_TOKENS
    assert not held_out & {bytes(window.numpy()) for window in workloads.token_windows(source_text(TEXT_BYTES))}


@pytest.mark.timeout(LIMIT_S + 20)
def test_gpt_124m_trains_and_is_judged_in_bfloat16(ranks: Ranks) -> None:
    for computed, run in ranks.run(_train_small_gpt_124m, 2, 0, timeout_s=LIMIT_S):
        assert computed == {torch.bfloat16}
        losses = [step.held_out for step in run.steps]
        assert [number for number, loss in enumerate(losses, 1) if loss is not None] == [1, 6]
        assert losses[0] > losses[-1] > 0


@pytest.mark.timeout(LIMIT_S + 20)
def test_to_compile_kernels_a_strategy_trains_for_some_steps_and_nobody_judges_it(ranks: Ranks) -> None:
    for _, run in ranks.run(_train_small_gpt_124m, 2, COMPILING, timeout_s=LIMIT_S):
        assert [step.held_out for step in run.steps] == [None] * worker.COMPILING_STEPS


def _train_small_gpt_124m(rank: int, size: int, number: int) -> tuple[set[torch.dtype], MeasuredRun]:
    """Train it as a worker does in a round, but for its size; returns the types of its logits too."""
    workloads.TOKENS, workloads.TOKEN_CONTEXT = 512, 32
    small = replace(WORKLOADS["gpt_124m"], module=lambda: GPT(16, 1, 2, tokens=512, context=32, tied=True))
    WORKLOADS["gpt_124m"] = small
    schedule = Schedule("", "gpt_124m", "micro", 6, 0, 1, "cpu", until_loss=[0.0], compile_first=True)
    place = RankInfo(rank, rank, size, size, 1, "127.0.0.1", 0, store_is_there=True, interface="lo")
    turn = Turn(schedule, place, number, parse_strategies("sparse_dense:lr=0.01")[0], HashStore())
    computed: set[torch.dtype] = set()

    def note(module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear) and module.out_features == workloads.TOKENS:
            computed.add(output.dtype)

    nn.modules.module.register_module_forward_hook(note)
    return computed, worker._fit(turn, iter([]))


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
