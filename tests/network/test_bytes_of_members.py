"""What members of several ranks send to other machines: what one rank a machine sends, an equal part each."""

import pytest

from lightning_sparse.bench.cluster import Cluster
from tests.conftest import emulated
from tests.support.hosts import as_root
from tests.support.processes import LIMIT_S, Ranks
from tests.support.traffic import sent

INT4 = {"compressor": "sparse_dense", "wire_dtype": "int4", "local_group": "node"}


@as_root
@emulated(4 * LIMIT_S)
@pytest.mark.parametrize(
    ("machines", "local"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.programs) for each in ((2, 4), (4, 2)))]
)
def test_a_machine_of_several_ranks_sends_as_much_as_one_rank_does(ranks: Ranks, machines: int, local: int) -> None:
    ways = {"int4": INT4, "ddp": None} if (machines, local) == (2, 2) else {"int4": INT4}
    with Cluster(f"{machines}xunlimited") as cluster:
        alone = sent(ranks, cluster, machines, 1, {"int4": INT4})["int4"]
        found = sent(ranks, cluster, machines, local, ways)
    members, each = found["int4"], sum(alone.ranks) / machines / local
    assert members.same
    assert max(members.machines) <= 1.03 * min(alone.machines)
    assert all(abs(n - each) <= 0.05 * each for n in members.ranks + members.counted)
    if "ddp" in found:
        assert max(members.machines) <= 0.095 * min(found["ddp"].machines)
