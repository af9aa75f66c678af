"""What members of several ranks send to other machines: what one rank a machine sends, an equal part each."""

from lightning_sparse.bench.cluster import Cluster
from tests.conftest import emulated
from tests.support.hosts import as_root
from tests.support.processes import LIMIT_S, Ranks
from tests.support.traffic import sent

INT4 = {"compressor": "sparse_dense", "wire_dtype": "int4", "local_group": "node"}


@as_root
@emulated(4 * LIMIT_S)
def test_a_machine_of_several_ranks_sends_as_much_as_one_rank_does(ranks: Ranks) -> None:
    with Cluster("4xunlimited") as cluster:
        for machines, several in ((2, (2, 4)), (4, (2,))):
            alone = sent(ranks, cluster, machines, 1, {"int4": INT4})["int4"]
            for local in several:
                ways = {"int4": INT4, "ddp": None} if (machines, local) == (2, 2) else {"int4": INT4}
                found = sent(ranks, cluster, machines, local, ways)
                members, each = found["int4"], sum(alone.ranks) / machines / local
                assert members.same, (machines, local)
                assert max(members.machines) <= 1.03 * min(alone.machines), (machines, local)
                assert all(abs(n - each) <= 0.05 * each for n in members.ranks + members.counted), (machines, local)
                if "ddp" in found:
                    assert max(members.machines) <= 0.095 * min(found["ddp"].machines)
