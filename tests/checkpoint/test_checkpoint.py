"""What is unsent survives a checkpoint."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.checkpoint.rank_local import with_buffers_apart
from lightning_sparse.checkpoint.state import KEY, State
from tests.support.models import Counted, Does, Small, data, small, trainer, unsent, weights
from tests.support.processes import Ranks
from tests.support.said import warned

OTHERS = {
    "momentum": ls.MomentumCorrection(0.9, ls.MiCRO(density=0.05), clip_norm=1.0),
    "warmup": ls.Warmup(8, ls.SketchFusion(density=0.05, momentum=0.9)),
}


def train(
    rank: int, size: int, folder: str, name: str, steps: int, resume: str | None, residuals: str
) -> tuple[Tensor, dict[str, Tensor]]:
    strategy = ls.SparseDDPStrategy(OTHERS.get(name, name), residuals=residuals)
    model = small(optimizer="adam")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    run = trainer(strategy, size, max_steps=steps, callbacks=[saver])
    run.fit(model, data(10, size), ckpt_path=resume)
    return weights(model), unsent(strategy)


def train_each(rank: int, size: int, folder: str, names: list[str], resume: bool) -> list[Any]:
    """14 steps with each name, or the last four of them, from the checkpoint that others wrote after the first ten."""
    results = []
    for name in names:
        half = f"{folder}/{name}/step=10.ckpt" if resume else None
        results.append(train(rank, size, f"{folder}/{name}{'-resumed' * resume}", name, 14, half, "per_rank"))
    return results


def test_a_resumed_run_equals_one_that_never_stopped(ranks: Ranks, tmp_path: Path) -> None:
    size, names = 2, [*ls.COMPRESSORS, *OTHERS]
    straight, resumed = (ranks.run(train_each, size, str(tmp_path), names, resume) for resume in (False, True))
    for one, other in zip(straight, resumed, strict=True):
        for name, (w, u), (w2, u2) in zip(names, one, other, strict=True):
            assert torch.equal(w, w2), name
            assert u.keys() == u2.keys()
            assert all(torch.equal(u[k], u2[k]) for k in u), name
    for name in names:
        state = torch.load(tmp_path / name / "step=10.ckpt", weights_only=True)[KEY]
        assert state["size"] == size
        assert state["steps"] == 10
        assert state["unsent"]["net.0.weight"].shape == (size, 33, 8)


def look() -> Does:
    """What is unsent when training starts."""
    return Does("on_train_start", lambda run: unsent(run.strategy))


WITHIN = {"on_before_zero_grad": {}, "on_after_backward": {"gradient_clip_val": 0.05}}


def save_within(rank: int, size: int, folder: str) -> list[tuple[str, list[Tensor]]]:
    """What trainings come to that saved within a step, and those that go on from there."""
    found = []
    for hook, options in WITHIN.items():
        for name, wire in (("micro", "float32"), ("sparse_dense", "int4")):
            path, ends = f"{folder}/{hook}{name}.ckpt", []
            saves = Does(hook, lambda run, path=path: run.global_step == 5 and run.save_checkpoint(path))
            for resumes in (False, True):
                strategy, model = ls.SparseDDPStrategy(name, wire_dtype=wire), small(optimizer="adam")
                run = trainer(strategy, size, max_steps=9, callbacks=[] if resumes else [saves], **options)
                run.fit(model, data(5, size), ckpt_path=path if resumes else None)
                ends.append(torch.cat([weights(model), *(x.flatten() for x in unsent(strategy).values())]))
            found.append((f"{hook} {name}", ends))
    return found


def test_a_step_that_is_saved_before_its_optimizer_is_made_again(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(save_within, 2, str(tmp_path)):
        for case, (straight, resumed) in found:
            assert torch.equal(straight, resumed), case


def resume_elsewhere(rank: int, size: int, path: str) -> tuple[dict[str, Tensor], Tensor]:
    """What is unsent before the first of three more steps, and the weights after them."""
    start, model = look(), small(optimizer="adam")
    trainer("skip_reduce", size, max_steps=13, callbacks=[start]).fit(model, data(20, size), ckpt_path=path)
    return start.found[0], weights(model)


@pytest.mark.parametrize(("before", "after", "residuals"), [(2, 4, "per_rank"), (3, 1, "mean")])
def test_another_number_of_ranks_starts_from_the_mean(
    ranks: Ranks, before: int, after: int, residuals: str, tmp_path: Path
) -> None:
    """What the mean gradient still lacks is a P-th of the sum of what the ranks keep."""
    saved = ranks.run(train, before, str(tmp_path), "skip_reduce", 10, None, residuals)
    results = ranks.run(resume_elsewhere, after, str(tmp_path / "step=10.ckpt"))
    back = [found for found, _ in results]
    assert all(torch.equal(trained, results[0][1]) for _, trained in results)
    assert not torch.equal(results[0][1], saved[0][0])
    for name in saved[0][1]:
        residual = sum(u[name].double() for _, u in saved) / before
        assert torch.allclose(sum(u[name].double() for u in back) / after, residual, rtol=1e-6, atol=1e-9)


def cross_load(rank: int, size: int, folder: str) -> Any:
    """Ours into plain DDP, plain DDP's into ours, and ours with other parameters."""
    out = Path(folder)

    def fit(strategy: Any, steps: int, resume: Path | None = None) -> Any:
        run = trainer(strategy, size, max_steps=steps)
        run.fit(small(), data(10, size), ckpt_path=resume)
        return run

    fit("skip_reduce", 3).save_checkpoint(out / "ours.ckpt")
    fit("ddp", 5, out / "ours.ckpt").save_checkpoint(out / "plain.ckpt")
    with pytest.warns(UserWarning, match="holds no residuals") if rank == 0 else nullcontext():
        fit("skip_reduce", 7, out / "plain.ckpt").save_checkpoint(out / "weights.ckpt", weights_only=True)
    fit(ls.SparseDDPStrategy(residuals="none"), 3).save_checkpoint(out / "none.ckpt")
    return [KEY in torch.load(out / f"{n}.ckpt", weights_only=True) for n in ("ours", "plain", "weights", "none")]


def test_checkpoints_go_to_and_from_plain_ddp(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(cross_load, 2, str(tmp_path))[0] == [True, False, False, False]


# - where a checkpoint is written and how


def train_with_many_checkpoints(
    rank: int, size: int, folder: str, steps: int, resume: str | None
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Saved in mid-epoch, in the background, only the best kept, the last as a link."""
    Path(folder).mkdir(exist_ok=True)  # Lightning's link may be sooner than its writer, which makes the folder
    strategy = ls.SparseDDPStrategy("micro", fusion="none")
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=7, save_top_k=1, monitor="step", mode="max", save_last="link"
    )
    run = trainer(
        strategy, size, max_steps=steps, callbacks=[saver], plugins=[AsyncCheckpointIO()],
        use_distributed_sampler=False,
    )  # fmt: skip
    run.fit(small(optimizer="adam"), Counted(data(10, size, seed=rank)), ckpt_path=resume)
    return weights(run.lightning_module), unsent(strategy), sorted(p.name for p in Path(folder).iterdir())


def test_mid_epoch_links_deletion_and_background_writing(ranks: Ranks, tmp_path: Path) -> None:
    size = 2
    a, b, c = (str(tmp_path / name) for name in "abc")
    straight = ranks.run(train_with_many_checkpoints, size, a, 17, None)
    half = ranks.run(train_with_many_checkpoints, size, b, 7, None)
    assert straight[0][2] == ["last.ckpt", "step=14.ckpt"]  # step=7.ckpt, and all in it, is gone
    assert half[0][2] == ["last.ckpt", "step=7.ckpt"]
    assert (tmp_path / "b" / "last.ckpt").is_symlink()
    resumed = ranks.run(train_with_many_checkpoints, size, c, 17, str(tmp_path / "b" / "last.ckpt"))
    for (w, u, _), (w2, u2, _) in zip(straight, resumed, strict=True):
        assert torch.equal(w, w2)
        assert all(torch.equal(u[k], u2[k]) for k in u)


def fit_twice(rank: int, size: int) -> list[dict[str, Tensor]]:
    """What is unsent after a fit of no steps that follows one of five, and after one of another model."""
    strategy = ls.SparseDDPStrategy("micro")
    run, model = trainer(strategy, size, max_steps=5), small()
    run.fit(model, data(10, size))
    left = [unsent(strategy)]
    for again in (model, small()):
        run.fit(again, data(10, size))  # which ends at once
        left.append(unsent(strategy))
    return left


def test_a_second_fit_of_the_same_model_goes_on_with_what_was_unsent(ranks: Ranks) -> None:
    for first, same, other in ranks.run(fit_twice, 2):
        assert sum(float(x.abs().sum()) for x in first.values()) > 0
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert all(not x.any() for x in other.values())


# - into another configuration


class Changed(Small):
    """One parameter reshaped, one gone, one new."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")
        self.net[4] = nn.Linear(17, 5)
        self.net[2] = nn.Linear(33, 17, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x)[:, :3] * self.scale, y)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What a user does who changes a model in mid-training."""
        checkpoint["state_dict"] = self.state_dict()
        checkpoint["optimizer_states"] = []


def test_what_residuals_add_to_a_file_is_reported_once_and_is_a_warning_above_a_gibibyte() -> None:
    strategy, said = (
        ls.SparseDDPStrategy(),
        r"add 2,048\.0 MiB to every checkpoint, .* in 1\.5 s.* plain DDP .* dropped",
    )
    strategy._report_size(40, 0.1)  # zeros, which nobody misses
    with pytest.warns(UserWarning, match=said):
        strategy._report_size(2**31, 1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy._report_size(2**31, 1.5)
        ls.SparseDDPStrategy()._report_size(2**20, 0.1)


def resume_as(rank: int, size: int, path: str) -> dict[str, tuple[dict[str, Tensor], list[str], int]]:
    """By what has changed, what is unsent before the first step, and the warnings about it."""
    found = {}
    for how in ("compressor", "density", "fusion", "model"):
        strategy = ls.SparseDDPStrategy(
            {"compressor": "micro", "density": ls.SkipReduce(0.75)}.get(how, "skip_reduce"),
            fusion="none" if how == "fusion" else "layer",
        )
        model = Changed() if how == "model" else small(optimizer="adam")
        start = look()
        run = trainer(strategy, size, max_steps=12, callbacks=[start])
        said = warned(run.fit, model, data(20, size), ckpt_path=path)  # two steps more
        said = [each for each in said if "another configuration" in each]
        found[how] = start.found[-1], said, strategy.averager.steps
    return found


def test_what_carries_over_does_and_what_cannot_is_named_once(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(train, 2, str(tmp_path), "skip_reduce", 10, None, "per_rank")
    results = ranks.run(resume_as, 2, str(tmp_path / "step=10.ckpt"))
    for (_, kept), of_rank in zip(saved, results, strict=True):
        for how, (found, _, steps) in of_rank.items():
            same = [name for name in found if name in kept and found[name].shape == kept[name].shape]
            assert len(same) == (2 + 1 if how == "model" else len(kept)), how
            assert all(torch.equal(found[name], kept[name]) for name in same), how
            assert steps == 2, how
    said = {how: of_rank_0[1] for how, of_rank_0 in results[0].items()}
    assert {how: len(each) for how, each in said.items()} == {"compressor": 1, "density": 1, "fusion": 0, "model": 1}
    for how in ("compressor", "density"):
        assert "it was written with SkipReduce(skip=0.5" in said[how][0]
        now = "MiCRO(density=0.05" if how == "compressor" else "SkipReduce(skip=0.75"
        assert f"and is read with {now}" in said[how][0]
        assert ": what was not sent goes on, and what compressors remember beside it, such as thr" in said[how][0]
    for expected in (
        "parameters that are gone or frozen is dropped (net.2.bias)",
        "parameters of another shape start from zero (net.4.bias, net.4.weight)",
        "new parameters start from zero (scale)",
    ):
        assert expected in said["model"][0]
    assert not results[0]["model"][0]["scale"].any()


def test_buffers_that_versions_up_to_0_2_0_averaged_are_each_ranks_own() -> None:
    rows = {name: torch.randn(2, 3) for name in ("weight", "norm.running_mean")}
    local = {"buffers": {"seen": torch.ones(2)}}
    groups = [{"names": [name], "memory": {}} for name in rows]
    state = State("per_rank", 2, 5, rows, groups, "Dense()", {}, local)
    apart = with_buffers_apart(state, {"norm.running_mean", "seen", "new"})
    assert [list(apart.unsent), [group["names"] for group in apart.groups]] == [["weight"], [["weight"]]]
    assert apart.local["buffers"] == local["buffers"] | {"norm.running_mean": rows["norm.running_mean"]}
    assert with_buffers_apart(apart, {"norm.running_mean"}) is apart
