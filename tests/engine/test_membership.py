"""What a host does that others have lost, or that has lost others; on real hosts that is a matter of time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sparse.elastic.averager import ElasticAverager
from lightning_sparse.elastic.membership import Membership
from lightning_sparse.network.host_ranks import HostRanks
from lightning_sparse.network.torch_comm import RankLost


class Host:
    """A host whose last exchange has failed with one group on its way, and what became of the group."""

    def __init__(self, has_voted: bool) -> None:
        self.found: list[str] = []
        replica = SimpleNamespace(
            apply_move=lambda: self.found.append("applied"), drop=lambda: self.found.append("dropped")
        )
        weights = SimpleNamespace(apply_moves=lambda replicas: [each.apply_move() for each in replicas])
        nothing = SimpleNamespace(
            receive=lambda inside: None, read=lambda size: None, drop=lambda: None, accept=lambda: None
        )
        averager: Any = ElasticAverager.__new__(ElasticAverager)
        averager._membership = SimpleNamespace(
            commit=lambda error: False, note_failure=lambda: None, committed=4, described={}
        )
        averager._in_exchange, averager._has_voted, averager._exchanged, averager._in_doubt = True, has_voted, 4, None
        averager._ranks, averager._inside, averager.weights = HostRanks(), None, weights
        averager._dropped, averager.moments, averager.set_by_others = 0, nothing, nothing
        averager.lanes = [SimpleNamespace(comm=SimpleNamespace(size=2))]
        self.averager = averager
        assert not averager._counts(SimpleNamespace(error=RankLost("a host is gone"), replicas=[replica]))

    def meet(self, committed: int) -> None:
        """Meet others whose last exchange that counted is another."""
        self.averager._catch_up({"replicas": [], "remembered_of": 2, "committed": committed, "history": 1})


def test_a_host_that_has_voted_applies_the_exchange_late_where_another_has_applied_it() -> None:
    host = Host(has_voted=True)
    assert host.found == []  # nobody knows yet
    host.meet(committed=5)
    assert host.found == ["applied"]


def test_a_host_that_has_not_voted_drops_the_exchange_at_once() -> None:
    assert Host(has_voted=False).found == ["dropped"]


def member(rank: int, rows: torch.Tensor, committed: int, was_made_anew: bool = False) -> Membership:
    """One host of two that have met, which tell each other ``rows``."""
    membership: Any = Membership.__new__(Membership)
    membership._hosts = SimpleNamespace(
        group=None, rank=rank, size=2, key=1, was_made_anew=was_made_anew, failure="", address="10.0.0.1"
    )
    membership._ranks, membership._is_connected, membership._all_are = HostRanks(), True, True
    membership._name, membership._digest, membership.committed, membership.history = 1, 5, committed, 9
    membership.failed, membership.lost, membership._known = 0, 0, set()
    membership.comm = SimpleNamespace(
        join=lambda *_: None, leave=lambda: None, all_gather=lambda own: SimpleNamespace(wait=lambda: rows)
    )
    return membership


# Rows are steps, key, digest of the settings, exchanges, looks at gradients, whether all ranks are there, name, way.
@pytest.mark.parametrize(("column", "fits"), [(None, True), (3, False), (4, False)])
def test_hosts_that_are_not_equally_far_meet_again(column: int | None, fits: bool) -> None:
    rows = torch.tensor([[7, 1, 5, 3, 2, 1, 1, 9], [8, 2, 5, 3, 2, 1, 2, 9]])
    if column is not None:
        rows[1, column] += 1
    assert member(0, rows, committed=3).greet(7, 2) == (8 if fits else None)


def test_where_nobody_has_begun_all_follow_the_first_host() -> None:
    rows = torch.tensor([[0, 1, 5, 0, 0, 1, 1, 9], [0, 2, 5, 0, 0, 1, 2, 9]])
    for rank in range(2):
        membership = member(rank, rows, committed=0)
        assert membership.greet(0, 0) is None
        assert membership.committed == (rank == 0)


def test_hosts_of_one_name_are_warned() -> None:
    rows = torch.tensor([[7, 1, 5, 3, 2, 1, 1, 9], [7, 2, 5, 3, 2, 1, 1, 9]])
    with pytest.warns(UserWarning, match="must be a name that no other host has"):
        assert member(0, rows, committed=3, was_made_anew=True).greet(7, 2) == 7


def test_hosts_that_met_apart_follow_the_most() -> None:
    """Who is as far as the others, but was alone for a while, gets their average."""
    rows = torch.tensor([[7, 1, 5, 3, 2, 1, 1, 4], [7, 2, 5, 3, 2, 1, 2, 9], [7, 3, 5, 3, 2, 1, 3, 9]])
    most = member(1, rows, committed=3)
    assert (most.greet(7, 2), most.committed) == (None, 3)
    alone = member(0, rows, committed=3)
    alone.history = 4
    assert (alone.greet(7, 2), alone.committed) == (None, 2)


def test_the_way_of_a_host_is_told_by_whom_it_met() -> None:
    rows = torch.tensor([[7, 1, 5, 3, 2, 1, 1, 9], [7, 2, 5, 3, 2, 1, 2, 9]])
    ways = []
    for known in ({1, 2}, {1, 2}, {1}):
        host = member(0, rows, committed=3)
        host._known = known
        host.note_success(3)
        assert host.committed == 4
        ways.append(host.history)
    assert ways[0] == ways[1] != ways[2]
