"""Where a process stands among the ranks of a benchmark."""

import os
from dataclasses import dataclass

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_sparse.bench.compare.probe import interface_towards, read_sent


@dataclass(frozen=True)
class Place:
    """The position of this process among the ranks."""

    rank: int  # of all
    local_rank: int  # of those on this host
    size: int  # number of ranks
    local_size: int  # number of ranks on this host
    address: str  # of the host of rank 0
    port: int  # there, for the workers' store
    store_is_there: bool  # whether torchrun's agent serves the store
    interface: str  # whose traffic is counted, and which Gloo and NCCL use

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.size // self.local_size

    @classmethod
    def find(cls, interface: str | None) -> "Place | None":
        """Read this process's place from what torchrun or SLURM set; None if neither started it.

        Args:
            interface: name of the network interface; None to find the one that leads to rank 0.

        Raises:
            ValueError: there is no such interface.
        """
        variables = os.environ
        started: TorchElasticEnvironment | SLURMEnvironment
        if TorchElasticEnvironment.detect():
            started = TorchElasticEnvironment()
            local_size = int(variables["LOCAL_WORLD_SIZE"])
        elif SLURMEnvironment.detect():
            started = SLURMEnvironment()
            local_size = started.world_size() // int(variables["SLURM_NNODES"])
        else:
            return None
        address, port = started.main_address, started.main_port
        store_is_there = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        interface = interface or variables.get("GLOO_SOCKET_IFNAME") or interface_towards(address)
        read_sent(interface)  # complains now if there is none of this name
        ranks = started.global_rank(), started.local_rank(), started.world_size(), local_size
        return cls(*ranks, address, port, store_is_there, interface)
