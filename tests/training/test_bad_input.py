"""Bad input that only real processes can show: it is refused on every rank, in time, or does no harm."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import KEY
from tests.conftest import Ranks
from tests.training.models import LIMIT_S, Small, data, small, trainer, unsent, weights

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]


def resume(rank: int, size: int, folder: str) -> tuple[str, bool]:
    """What resuming from a damaged file says, and whether the file without our part is loaded."""
    path = Path(folder) / f"{size}.ckpt"
    first = trainer("micro", size, max_steps=4)
    first.fit(small(), data(10, size))
    first.save_checkpoint(path)
    first.strategy.barrier()
    if rank == 0:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint[KEY]["unsent"]["net.2.weight"][1, 3, 5] += 1e-3
        torch.save(checkpoint, path)
        checkpoint.pop(KEY)
        torch.save(checkpoint, path.with_suffix(".without"))
    first.strategy.barrier()
    said = ""
    try:
        trainer("micro", size, max_steps=6).fit(small(), data(10, size), ckpt_path=path)
    except ValueError as error:
        said = str(error)
    again = trainer("micro", size, max_steps=6)
    with pytest.warns(UserWarning, match="holds no residuals") if rank == 0 else nullcontext():
        again.fit(small(), data(10, size), ckpt_path=path.with_suffix(".without"))
    return said, again.global_step == 6


def test_a_damaged_checkpoint_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for said, resumed in ranks.run(resume, 2, str(tmp_path), timeout_s=LIMIT_S):
        assert "in the checkpoint are damaged: the checksum of rank 1's part is " in said
        assert "Resume from an older checkpoint, or without them" in said
        assert resumed


class Holey(Small):
    """With parameters of no element and of one, as a layer of no width has."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))
        self.no_columns = nn.Linear(0, 3)
        self.one = nn.Parameter(torch.ones(()))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        output = self.net(x) * self.one + self.no_columns(x[:, :0]) + self.none.sum()
        return nn.functional.cross_entropy(output, y)


def train_holey(rank: int, size: int, name: str, fusion: str) -> tuple[Tensor, int, int]:
    torch.manual_seed(0)
    model, strategy = Holey(), ls.SparseDDPStrategy(name, fusion=fusion)
    trainer(strategy, size, max_steps=5).fit(model, data(5, size))
    return weights(model), len(unsent(strategy)), sum(x.numel() for x in unsent(strategy).values())


@pytest.mark.parametrize("fusion", ["layer", "none"])
@pytest.mark.parametrize("name", ["skip_reduce", "ok_topk", "importance"])
def test_parameters_of_no_element_and_of_one_train(ranks: Ranks, name: str, fusion: str) -> None:
    """With fusion="none" in groups of their own, smaller than the number of ranks."""
    (first, parameters, elements), *others = ranks.run(train_holey, 3, name, fusion, timeout_s=LIMIT_S)
    assert parameters == 10
    assert elements == first.numel()
    assert first.isfinite().all()
    assert all(torch.equal(first, trained) for trained, _, _ in others)
