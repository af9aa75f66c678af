"""A Comm has one format of values; in another it is the same ranks."""

import torch

import lightning_sparse as ls
from lightning_sparse.compressors import Rounded
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.network.sums import sum_values
from lightning_sparse.options import Options
from lightning_sparse.settings import as_text
from lightning_sparse.wire import FLOAT32, INT4, INT8


def test_in_another_format_a_comm_counts_with_the_first_and_has_its_buffers_and_costs() -> None:
    network = SimNetwork(2, FLOAT32)
    first, other = network.comms[0], network.comms[0].in_format(INT4)
    assert (first.wire_dtype, other.wire_dtype) == (FLOAT32, INT4)
    assert other.buffers is first.buffers
    assert other.costs is first.costs
    network.run([sum_values(torch.ones(256), comm.in_format(INT4)) for comm in network.comms])
    assert (first.sent_bytes, first.messages, first.hops) == (other.sent_bytes, other.messages, other.hops)
    assert (first.sent_bytes, first.messages, first.hops) == (INT4.nbytes(256), 1, 1)


DENSE_THEN_MICRO = [ls.Dense(), ls.Dense(), ls.MiCRO(), ls.MiCRO()]


class Noted(ls.Compressor):
    def __init__(self) -> None:
        self.formats: list[str] = []

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        self.formats.append(comm.wire_dtype.name)
        return (yield comm.all_reduce(group.unsent.clone()))


def test_a_compressor_with_a_format_of_its_own_is_handed_it_and_nobody_else_sees_it() -> None:
    noted, network = Noted(), SimNetwork(2, FLOAT32)
    rounded = object.__new__(Rounded)  # Noted is no dataclass, which Rounded would refuse
    vars(rounded).update(compressor=noted, wire_dtype=INT8.name)
    groups = [Group(0, ("w",), (torch.zeros(8),)) for _ in network.comms]
    rounds = [rounded.reduce(group, comm) for group, comm in zip(groups, network.comms, strict=True)]
    next(rounds[0])  # within its step
    assert noted.formats == ["int8"]
    assert all(comm.wire_dtype == FLOAT32 for comm in network.comms)


def test_what_is_active_within_a_format_is_in_it_and_the_same_until_it_changes() -> None:
    within = Rounded(ls.Warmup(2, ls.MiCRO()), "int4")
    assert [within.active(step) for step in (0, 1, 2, 3)] == [Rounded(each, "int4") for each in DENSE_THEN_MICRO]
    assert within.active(0) is within.active(1)


def test_options_put_the_format_around_all_and_a_checkpoint_leaves_it_out() -> None:
    options = Options.of("micro", "none", wire_dtype="sign", warmup_steps=2)
    assert options.averaging == Rounded(ls.Warmup(2, ls.MiCRO()), "sign")
    assert options.as_saved == as_text(ls.Warmup(2, ls.MiCRO()))
    assert Options.of("micro", "none", wire_dtype="float32").averaging == ls.MiCRO()
