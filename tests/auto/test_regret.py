"""How much later sparse_auto is than the best of hindsight, in simulated trainings: docs/benchmarks/regret.py."""

import importlib.util
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "regret.py"
WORLDS = range(300)


@pytest.fixture(scope="module")
def regret() -> ModuleType:
    spec = importlib.util.spec_from_file_location("regret", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(regret: Any) -> Any:
    return [regret.play(seed, regret.sparse_auto) for seed in WORLDS]


def test_it_is_hardly_later_than_the_best(regret: Any, results: Any) -> None:
    regrets = [each.regret for each in results]
    assert fmean(regrets) < 0.04
    assert regret.share(regrets, 0.95) < 0.15
    for candidate in (regret.EXACT, regret.USUAL):
        assert fmean(regrets) < fmean(regret.play(seed, regret.always(candidate)).regret for seed in WORLDS) / 3


def test_where_float32_is_best_it_is_hardly_later_than_ddp(regret: Any, results: Any) -> None:
    regrets = [each.regret for each in results if each.world.best == regret.EXACT]
    assert len(regrets) > 10
    assert fmean(regrets) < 0.03


def test_a_world_is_the_same_each_time(regret: Any, results: Any) -> None:
    again = [regret.play(seed, regret.sparse_auto) for seed in WORLDS[:20]]
    assert [each.regret for each in again] == [each.regret for each in results[:20]]


def test_hindsight_is_what_a_training_with_one_candidate_takes(regret: Any) -> None:
    """A training that is trained step by step, without noise, takes what the world says of its candidate."""
    for seed in WORLDS[:10]:
        world = regret.replace(regret.World.drawn(seed), noise=0.0, pauses=0.0, dense_steps=300.0)
        training = regret.Training(world)
        training.in_use = regret.USUAL
        with suppress(regret.Ended):
            while True:
                training.step()
        assert training.now_s == pytest.approx(world.always[regret.USUAL], rel=0.01)
