"""Everything the training loop of Lightning can do: densely the bits of plain DDP, sparsely without losing gradient."""

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn

import lightning_sparse as ls
from tests.support import training_loop as models
from tests.support.models import Does, Small, data, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.training_loop import (
    PLAIN,
    Case,
    Ledger,
    Outcome,
    small_with,
    strategy_named,
    train,
    train_with,
    unsent,
)

DENSE = "sparse_dense"
SPARSE = ["micro", "skip_reduce"]
UNUSED = {"find_unused_parameters": True}
VIEW = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
HALF = 1e-2  # a mean is rounded to its parameter's dtype, as DDP's is

normed = small_with(lambda model: model.net.insert(1, nn.BatchNorm1d(33)))
averaging = partial(callbacks.StochasticWeightAveraging, swa_lrs=0.05, swa_epoch_start=2)

# Cases of a topic are trained one after the other by the same processes.
ACCUMULATION = {
    "accumulated more": Case(
        Small, {"max_epochs": 2}, callbacks=[partial(callbacks.GradientAccumulationScheduler, {0: 1, 1: 3})], batches=7
    ),
    "batches of several sizes": Case(models.Uneven, {"accumulate_grad_batches": 2, "max_steps": 8}, batches=16),
    "toggled": Case(models.Manual, {"max_steps": 6}, batches=18),
    "accumulated, clipped, view": Case(Small, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, VIEW),
    "two averaged backwards": Case(partial(models.TwoBackwards, used_again=True)),
}
CLIPPING = {
    "by norm": Case(Small, {"gradient_clip_val": 0.1}),
    "by value": Case(Small, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manually": Case(partial(models.Manual, clip=True), {"max_steps": 6}, batches=18, tolerance=None),
}
WITHOUT_GRADIENT = {
    "gan, steps together": Case(partial(models.Gan, together=True), {"max_steps": 16}, UNUSED),
    "unused in the second backward": Case(partial(models.TwoBackwards, used_again=False), {}, UNUSED, exact=False),
    "gradients kept as zeros": Case(
        partial(models.Heads, zeroed=True), {"accumulate_grad_batches": 2}, UNUSED | VIEW, batches=16
    ),
    "frozen": Case(small_with(lambda model: model.net[0].requires_grad_(False))),
    "frozen for an epoch": Case(Small, {"max_epochs": 2}, UNUSED, [partial(models.Unfreeze, before_setup=False)]),
}
PARAMETERS = {
    "tied": Case(models.Tied),
    "batchnorm": Case(normed),
    "bfloat16 beside float32": Case(models.Dtypes, tolerance=HALF),
    "channels last, view": Case(models.Conv, {}, VIEW),
    "transposed": Case(small_with(models.transpose)),
}
WRAPPED = {
    "compiled inside": Case(small_with(models.compile_inside)),
    "compiled whole": Case(models.compiled_whole),
    "recomputed": Case(models.Recomputed),
    "recomputed, reentrant": Case(partial(models.Recomputed, reentrant=True)),
    "recomputed, reentrant twice": Case(partial(models.Recomputed, reentrant=True, calls=2), {}, STATIC),
    "static": Case(Small, {}, STATIC | VIEW),
}
OPTIMIZERS = {
    "swa, batchnorm": Case(normed, {"max_epochs": 4}, callbacks=[averaging]),
    "one cycle": Case(models.Scheduled, {"max_epochs": 2, "val_check_interval": 3}, validated=True),
    "plateau": Case(partial(models.Scheduled, "plateau"), {"max_epochs": 3}, validated=True),
    "lbfgs": Case(models.Lbfgs),
}
if hasattr(callbacks, "EMAWeightAveraging"):  # since Lightning 2.6
    ema = partial(callbacks.EMAWeightAveraging, decay=0.5)
    OPTIMIZERS["ema"] = Case(models.Scheduled, {"max_epochs": 2}, callbacks=[ema], validated=True)
    WRAPPED["static, manual"] = Case(partial(models.Manual, every=1), {}, STATIC)  # before, DDP left a step out
KEPT = {  # by reference, over the next backward
    "surgery": Case(models.Surgery, tolerance=None),
    "last gradient": Case(models.Remembers),
}
PRECISION = {
    "bf16-mixed": Case(Small, {"precision": "bf16-mixed"}),
    "bf16-true": Case(Small, {"precision": "bf16-true"}, tolerance=HALF),
}
BETWEEN_BACKWARDS = [
    Case(partial(models.TwoBackwards, used_again=False), {}, UNUSED | VIEW, exact=False),
    Case(partial(models.TwoBackwards, used_again=None), {}, UNUSED, exact=False),
]


def check_law(outcomes: Sequence[Outcome], tolerance: float) -> None:
    off = sum((o.lost for o in outcomes), torch.zeros(()))
    assert float(off.abs().max()) <= tolerance
    assert min(o.given for o in outcomes) > 10  # else the law is about nothing


def check_replicas(outcomes: Sequence[Outcome]) -> None:
    trained = outcomes[0].weights
    assert all(torch.equal(o.weights, trained) for o in outcomes)
    assert bool(torch.isfinite(trained).all())
    assert not torch.equal(trained, outcomes[0].initial)


def check_case(ranks: Sequence[Sequence[Outcome]], case: Case) -> None:
    """Densely the same as plain DDP, and with each strategy as each rank has given."""
    plain, dense, *sparse = zip(*ranks, strict=True)
    for ours, theirs in zip(dense, plain, strict=True):
        same: Callable[[Tensor, Tensor], bool] = torch.equal if case.exact else partial(torch.allclose, atol=1e-5)
        assert same(ours.weights, theirs.weights)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=0 if case.exact else 1e-4)
    for outcomes in [plain, dense, *sparse]:
        check_replicas(outcomes)
        if case.tolerance is not None:
            check_law(outcomes, case.tolerance)
    assert all(o.kept > 0.1 for outcomes in sparse for o in outcomes)


def train_each(rank: int, size: int, topic: str) -> dict[str, list[Outcome]]:
    sparse = itertools.cycle(SPARSE)
    return {name: train(rank, size, case, [PLAIN, DENSE, next(sparse)]) for name, case in TOPICS[topic].items()}


TOPICS = {
    "accumulation": ACCUMULATION, "clipping": CLIPPING, "without-gradient": WITHOUT_GRADIENT, "parameters": PARAMETERS,
    "wrapped": WRAPPED, "optimizers": OPTIMIZERS, "kept-gradients": KEPT, "precision": PRECISION,
}  # fmt: skip


@pytest.mark.parametrize("topic", TOPICS)
def test_dense_is_plain_ddp_and_nothing_is_lost(ranks: Ranks, topic: str) -> None:
    results = ranks.run(train_each, 2, topic)
    for name, case in TOPICS[topic].items():
        try:
            check_case([result[name] for result in results], case)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("case", BETWEEN_BACKWARDS, ids=["view", "on-one-rank"])
def test_nothing_is_lost_between_two_averaged_backwards_of_a_step(ranks: Ranks, case: Case) -> None:
    check_case(ranks.run(train, 2, case, [PLAIN, DENSE, *SPARSE]), case)


def test_a_frozen_sparse_embedding_is_allowed(ranks: Ranks) -> None:
    """Its gradient is never computed, so it does not matter that it would be sparse."""
    case = Case(partial(models.Tokens, sparse=True, frozen=True))
    check_case(ranks.run(train, 2, case, [PLAIN, DENSE, "micro"]), case)


def test_two_optimizers_taking_turns_lose_nothing_in_many_steps(ranks: Ranks) -> None:
    """While one network learns the other has no gradient, which DDP must look for."""
    names = ["micro", "sketch_fusion", "ok_topk"]
    case = Case(models.Gan, {"max_steps": 32}, UNUSED, batches=16)
    results = ranks.run(train, 2, case, names)
    for name, outcomes in zip(names, zip(*results, strict=True), strict=True):
        check_replicas(outcomes)
        check_law(outcomes, 1e-4)
        assert len(outcomes[0].lost) == 16
        assert outcomes[0].kept > 0.1, name


@pytest.mark.parametrize("options", [{}, VIEW], ids=["", "view"])
def test_layers_used_by_turns_lose_nothing_in_many_steps(ranks: Ranks, options: dict[str, Any]) -> None:
    """By one rank only, by all in some steps, only in a backward that is not averaged, and by nobody.

    DDP throws the mean of a parameter away that no rank used: what was sent of it then would be lost.
    """
    names = [DENSE, "ok_topk", "low_rank"]
    case = Case(models.Heads, {"accumulate_grad_batches": 2, "max_steps": 16}, UNUSED | options, batches=32)
    for name, *outcomes in zip(names, *ranks.run(train, 3, case, names), strict=True):
        check_replicas(outcomes)
        check_law(outcomes, 1e-4)
        assert len(outcomes[0].lost) == 16, name


def unfreeze(rank: int, size: int, name: str) -> str:
    case = Case(Small, {"max_epochs": 2, "check_every": 0}, {}, [partial(models.Unfreeze, before_setup=True)])
    try:
        return f"trained to {train_with(case, size, strategy_named(name, case)).weights.sum().item()}"
    except (RuntimeError, ValueError) as error:
        return str(error)


def test_plain_ddp_trains_what_was_frozen_at_setup_on_each_rank_apart(ranks: Ranks) -> None:
    """Why the next test asks for an error: DDP never hears of the parameter again, and replicas drift apart."""
    first, second = ranks.run(unfreeze, 2, PLAIN)
    assert first.startswith("trained")
    assert first != second


def test_unfreezing_what_was_frozen_at_setup_is_refused(ranks: Ranks) -> None:
    assert all("net.0.weight" in message for message in ranks.run(unfreeze, 2, "skip_reduce"))


def at_start(run: L.Trainer) -> tuple[float, list[int]]:
    """How much is unsent, and the steps groups think it is."""
    averager = getattr(run.strategy, "averager", None)
    kept = sum(kept.abs().sum().item() for kept in unsent(run.strategy).values())
    return kept, [group.step for group in averager.groups] if averager else []


class Evaluated(models.Scheduled):
    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        scores: Tensor = self.net(batch[0])
        return scores


def fit_again(rank: int, size: int, names: Sequence[str]) -> list[Any]:
    """Validate, test and predict, then fit, twice on one Trainer; and all of it once more on another."""
    results: list[Any] = []
    for name in names:
        torch.manual_seed(0)
        model = Evaluated()
        seen: list[Any] = []
        for _ in range(2):
            start, ledger = Does("on_train_start", at_start), Ledger()
            strategy = strategy_named(name, Case(Evaluated))
            run = trainer(strategy, size, max_epochs=0, callbacks=[start, ledger])
            for _ in range(2):
                for evaluate in (run.validate, run.test):
                    seen.append(evaluate(model, data(2, size, seed=1), verbose=False)[0])
                predictions: Any = run.predict(model, data(2, size, seed=1))
                seen.append(torch.cat(predictions))
                run.fit_loop.max_epochs += 1
                run.fit(model, data(8, size), data(1, size, seed=1))
            kept = sum(kept.abs().sum().item() for kept in unsent(strategy).values())
            results.append((weights(model).clone(), seen, start.found, torch.stack(ledger.lost), kept))
    alive = [thread.name for thread in threading.enumerate() if thread.name == "lightning_sparse"]
    return [results, alive]


def test_evaluation_without_fit_and_fits_after_each_other(ranks: Ranks) -> None:
    """A second fit of the same model goes on with what is unsent, and its own steps; another Trainer starts anew."""
    names = [PLAIN, DENSE, "micro"]
    (first, alive), (second, _) = ranks.run(fit_again, 2, names)
    assert alive == []
    for number, ((trained, seen, start, lost, kept), (trained_2, _, _, lost_2, _)) in enumerate(
        zip(first, second, strict=True)
    ):
        name = names[number // 2]
        assert torch.equal(trained, trained_2), name
        (first_kept, first_steps), (second_kept, second_steps) = start
        assert first_kept == 0, name
        assert (second_kept > 0) == (name in SPARSE), name
        assert [*first_steps, *second_steps] == ([] if name == PLAIN else [0, 8]), name
        assert float((lost + lost_2).abs().max()) < 1e-5, name
        assert (kept > 0.1) == (name in SPARSE), name
        assert len(seen) == 12
    for (plain, seen, *_), (dense, seen_2, *_) in zip(first[:2], first[2:4], strict=True):
        assert torch.equal(plain, dense)
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(seen, seen_2, strict=True))


def itself(callback: L.Callback) -> Callable[[], L.Callback]:
    return lambda: callback


def find_rate(rank: int, size: int, names: Sequence[str], folder: str) -> Any:
    results = []
    for name in names:
        start, find = Does("on_train_start", at_start), callbacks.LearningRateFinder(num_training_steps=8)
        case = Case(models.Rated, {"default_root_dir": folder}, {}, [itself(find), itself(start)])
        outcome = train_with(case, size, strategy_named(name, case))
        results.append((outcome, start.found, find.optimal_lr.results["loss"]))
    return results


def test_looking_for_a_learning_rate_leaves_nothing_unsent_behind(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(find_rate, 2, [PLAIN, DENSE, "micro"], str(tmp_path))
    for plain, dense, *sparse in results:
        assert torch.equal(plain[0].weights, dense[0].weights)
        assert plain[2] == dense[2]
        assert all(start == [(0.0, [0])] for _, start, _ in (dense, *sparse))
    for outcomes in zip(*[[outcome for outcome, *_ in result] for result in results], strict=True):
        check_replicas(outcomes)
        check_law(outcomes, 1e-5)


def compiled_names(rank: int, size: int) -> list[list[str]]:
    names = []
    for case in (Case(small_with(models.compile_inside)), Case(models.compiled_whole)):
        strategy = ls.SparseDDPStrategy()
        train_with(case, size, strategy)
        names.append(sorted(name for group in strategy.averager.groups for name in group.names))
    return names


def test_a_compiled_model_keeps_its_names(ranks: Ranks) -> None:
    """What is unsent fits the model with and without compilation."""
    names = sorted(name for name, _ in small().named_parameters())
    assert ranks.run(compiled_names, 2) == [[names, names]] * 2
