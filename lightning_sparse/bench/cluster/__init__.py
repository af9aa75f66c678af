"""An emulated cluster on one machine: hosts as network namespaces, joined by links of a set rate.

>>> with Cluster("4x1gbit") as cluster:  # doctest: +SKIP
...     cluster.run([["hostname", "-I"]] * cluster.hosts, timeout_s=10)

Each host is a network namespace with one interface, ``eth0``, that leads to a bridge in a namespace of the cluster's
own. Both ends of each link are limited by ``tc tbf``, so a host sends and receives at most at its rate. No interface,
address or route is ever made outside the cluster's namespaces, and nothing in them leads outside. Hosts share the
machine's files, process ids, processor cores and memory. Several processes started in one host share its loopback
interface, which has no limit, as on a real host. TCP's settings, such as its congestion control, are the machine's.
"""

from lightning_sparse.bench.cluster.available import ClusterError, unavailable_reason
from lightning_sparse.bench.cluster.processes import Cluster
from lightning_sparse.bench.cluster.spec import ClusterSpec, parse, parse_rate

__all__ = ["Cluster", "ClusterError", "ClusterSpec", "parse", "parse_rate", "unavailable_reason"]
