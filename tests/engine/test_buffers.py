"""Buffers on ranks that are threads: rank 0's on all, batch norm's mean, and what is neither sent nor touched."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.engine.lanes import Lane
from lightning_sparse.local_steps.averager import PendingExchange
from lightning_sparse.local_steps.buffers import ModuleBuffers
from lightning_sparse.network.simulated import same_bits
from tests.support.in_process import ThreadComm, ThreadRanks

T = TypeVar("T")
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


class Rank:
    """One rank's buffers."""

    def __init__(self, comm: ThreadComm, module: nn.Module, **options: Any) -> None:
        self.module, self.lane = module, Lane(comm, threaded=False)
        self.buffers = ModuleBuffers(module, **options)
        self.number = comm.rank

    def turn(self, meanwhile: Callable[["Rank"], object] = lambda _: None, compares: bool = True) -> None:
        """An exchange, and what training does meanwhile."""
        flight = PendingExchange([self.lane])
        self.buffers.send(flight, self.lane, compares)
        meanwhile(self)
        assert flight.error is None, flight.error
        self.buffers.receive()

    def show(self) -> None:
        self.buffers.show(lambda work: work(self.lane), self.lane.comm.size)


class Ranks:
    """Some ranks, each with a module of its own."""

    def __init__(self, module: Callable[[int], nn.Module], size: int = 2, **options: Any) -> None:
        self.threads = ThreadRanks(size)
        groups = [self.threads.network.group(rank) for rank in range(size)]
        self.all = [Rank(ThreadComm(group), module(rank), **options) for rank, group in enumerate(groups)]

    def each(self, function: Callable[[Rank], T]) -> list[T]:
        return self.threads.everywhere(lambda rank: function(self.all[rank]))

    def of(self, name: str) -> list[Tensor]:
        return [rank.buffers.named()[name] for rank in self.all]


@pytest.fixture
def make() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*args: Any, **options: Any) -> Ranks:
        made.append(Ranks(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.threads.close()


def every_dtype(rank: int) -> nn.Module:
    module, generator = nn.Module(), torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        x = torch.randint(0, 100, (3, 5), generator=generator).to(dtype)
        module.register_buffer(f"saved_{str(dtype)[6:]}", x.clone())
        module.register_buffer(f"cache_{str(dtype)[6:]}", x[0, 0].clone(), persistent=False)
        module.register_buffer(f"same_{str(dtype)[6:]}", torch.ones(4, dtype=dtype))
    module.register_buffer("empty", torch.zeros(0))
    return module


def test_all_ranks_get_rank_0s_of_any_type_and_what_is_equal_is_not_touched(make: Any) -> None:
    ranks = make(every_dtype, 3)
    first = {name: x.clone() for name, x in ranks.all[0].buffers.named().items()}
    equal = {name for name in first if all(torch.equal(x, first[name]) for x in ranks.of(name))}
    before = [{name: x._version for name, x in rank.buffers.named().items()} for rank in ranks.all]
    ranks.each(Rank.turn)
    ranks.each(lambda rank: rank.turn(compares=False))
    for rank, versions in zip(ranks.all, before, strict=True):
        for name, x in rank.buffers.named().items():
            assert same_bits(x.reshape(-1), first[name].reshape(-1)), name
            assert (x._version == versions[name]) == (name in equal or rank.number == 0), name
    sent = [rank.lane.comm.sent_bytes for rank in ranks.all]
    ranks.each(Rank.turn)
    words = 8 * len(first) * 2  # to two others
    assert [rank.lane.comm.sent_bytes - each for rank, each in zip(ranks.all, sent, strict=True)] == [words] * 3


def test_rank_0s_replaces_what_others_did_meanwhile_and_never_its_own(make: Any) -> None:
    ranks = make(lambda rank: with_buffer(float(rank)))
    ranks.each(Rank.turn)
    ranks.each(lambda rank: rank.turn(lambda rank: rank.module.x.add_(10.0)))
    assert [x.item() for x in ranks.of("x")] == [10.0, 0.0]


def with_buffer(value: float) -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", torch.tensor(value))
    return module


def norm_of(rank: int, momentum: float | None = 0.7) -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(4, momentum=momentum))
    for _ in range(3):
        module(see(rank, 0))
    return module


def see(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(6, 4, generator=generator) * (4.0 if rank else 0.2) + rank


@pytest.mark.parametrize("momentum", [0.7, 0.1, None])
def test_a_batch_norm_goes_on_as_if_it_had_had_the_mean_before_the_batches_it_has_seen_since(
    make: Any, momentum: float | None
) -> None:
    ranks = make(lambda rank: norm_of(rank, momentum))
    ranks.each(Rank.turn)
    means = {n: torch.stack(ranks.of(n)).double().mean(0) for n in ("0.running_mean", "0.running_var")}
    expected = [norm_of(rank, momentum) for rank in range(2)]
    for rank, module in enumerate(expected):
        for name, mean in means.items():
            module.get_buffer(name).copy_(mean)
        for number in (1, 2):
            module(see(rank, number))
    ranks.each(lambda rank: rank.turn(lambda rank: [rank.module(see(rank.number, number)) for number in (1, 2)]))
    for name in means:
        for x, module in zip(ranks.of(name), expected, strict=True):
            assert torch.allclose(x, module.get_buffer(name), atol=1e-6), name
    assert all(bool((x >= 0).all()) for x in ranks.of("0.running_var"))
    ranks.each(Rank.show)
    for name in means:
        assert same_bits(*ranks.of(name))


def test_statistics_that_are_reset_meanwhile_or_not_finite_have_no_part(make: Any) -> None:
    ranks = make(norm_of)
    ranks.of("0.running_mean")[1].fill_(torch.nan)
    finite = ranks.of("0.running_mean")[0].clone()
    ranks.each(Rank.turn)
    ranks.each(lambda rank: rank.turn(lambda rank: rank.number or rank.module[0].reset_running_stats()))
    assert ranks.of("0.running_var")[0].tolist() == [1.0] * 4
    assert torch.equal(ranks.of("0.running_mean")[0], torch.zeros(4))
    assert torch.equal(ranks.of("0.running_mean")[1], finite)


def test_a_rank_gets_its_own_back_after_a_look_where_nobody_has_set_it(make: Any) -> None:
    ranks = make(every_dtype)
    own = [{name: x.clone() for name, x in rank.buffers.named().items()} for rank in ranks.all]
    ranks.each(Rank.show)
    assert all(same_bits(*(x.reshape(-1) for x in ranks.of(name))) for name in own[0])
    for rank, before in zip(ranks.all, own, strict=True):
        assert {n: x.tolist() for n, x in rank.buffers.own().items()} == {n: x.tolist() for n, x in before.items()}
    ranks.all[1].module.saved_float32.mul_(2.0)
    with torch.inference_mode():
        ranks.all[1].module.saved_int64 = torch.full((3, 5), 7)
    ranks.all[1].module.saved_int8.data.fill_(5)  # leaves no trace but its values
    ranks.all[1].module.cache_bool.copy_(ranks.all[1].module.cache_bool)  # to what it was
    ranks.each(lambda rank: rank.buffers.hide())
    was_set = {
        "saved_float32": 2 * own[0]["saved_float32"],
        "saved_int64": torch.full((3, 5), 7),
        "saved_int8": torch.full((3, 5), 5, dtype=torch.int8),
        "cache_bool": own[0]["cache_bool"],
    }
    for rank, before in zip(ranks.all, own, strict=True):
        for name, x in rank.buffers.named().items():
            expected = was_set.get(name, before[name]) if rank.number else before[name]
            assert torch.equal(x, expected), name
    for _ in range(2):  # what was set while it was shown is compared at once, and no other
        ranks.each(lambda rank: rank.turn(compares=False))
    for name in own[0]:
        assert torch.equal(ranks.of(name)[1], own[0][name] if name in was_set else own[1][name]), name


def test_what_one_rank_alone_has_set_is_everywhere_at_the_next_look(make: Any) -> None:
    ranks = make(lambda rank: with_buffer(float(rank)))
    ranks.each(Rank.show)
    ranks.all[0].module.x.fill_(5.0)
    ranks.each(Rank.show)
    ranks.each(lambda rank: rank.buffers.hide())
    assert [x.item() for x in ranks.of("x")] == [5.0, 5.0]


def test_buffers_may_come_late_change_their_shape_and_be_replaced(make: Any) -> None:
    ranks = make(lambda rank: with_buffer(float(rank)))
    ranks.each(Rank.turn)

    def late(rank: Rank) -> None:
        rank.module.x.resize_(3).fill_(float(rank.number + 1))
        rank.module.register_buffer("y", torch.full((2,), float(rank.number), dtype=torch.float64))

    ranks.each(lambda rank: rank.turn(late))
    for _ in range(2):
        ranks.each(Rank.turn)
    assert [x.tolist() for x in ranks.of("x")] == [[1.0] * 3] * 2
    assert [x.tolist() for x in ranks.of("y")] == [[0.0] * 2] * 2
    for rank in ranks.all:
        rank.module.x = torch.tensor([7.0 + rank.number])
    ranks.each(Rank.show)
    assert [x.tolist() for x in ranks.of("x")] == [[7.0]] * 2


def test_ignored_buffers_and_all_without_broadcast_buffers_are_each_ranks_own(make: Any) -> None:
    for options in ({"ignored": {"x"}}, {"shared": False}):
        ranks = make(lambda rank: with_buffer(float(rank)), **options)
        ranks.each(Rank.show)
        ranks.each(lambda rank: rank.buffers.hide())
        for _ in range(2):
            ranks.each(Rank.turn)
        assert [x.item() for x in ranks.of("x")] == [0.0, 1.0]
        assert ranks.all[0].lane.comm.messages == 0


def test_a_buffer_of_another_shape_on_a_rank_ends_the_training_in_words(make: Any) -> None:
    ranks = make(lambda rank: with_buffer(float(rank)))
    ranks.all[1].module.x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="buffer x must be of the same shape and type on every rank"):
        ranks.each(Rank.show)
