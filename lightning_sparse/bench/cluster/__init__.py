"""An emulated cluster on one machine: hosts as network namespaces, joined by links of a set rate and delay.

>>> with Cluster("4x1gbit") as cluster:  # doctest: +SKIP
...     cluster.run([["hostname", "-I"]] * cluster.hosts, timeout_s=10)

Each host is a network namespace with one interface, ``eth0``, that leads to a bridge in a namespace of the cluster's
own. Both ends of each link are limited by ``tc tbf``, so a host sends and receives at most at its rate. A delay, as in
``4x100mbit+50ms``, comes after the limiters of both ends. No interface, address or route is ever made outside the
cluster's namespaces, and nothing in them leads outside. Hosts share the machine's files, process ids, processor cores
and memory. Several processes started in one host share its loopback interface, which has neither limit nor delay, as
on a real host. ``/sys`` shows the machine's interfaces, not the host's. TCP's settings are the machine's, such as its
congestion control; with delays its buffers may grow to what the link can have under way, and its window is kept after
pauses, as on hosts that were tuned for such a link.

A user who is not root gets the namespaces within a user namespace, in which programs see the user as root.
"""

from lightning_sparse.bench.cluster.namespaces import ClusterError, unavailable_reason
from lightning_sparse.bench.cluster.processes import Cluster
from lightning_sparse.bench.cluster.spec import ClusterSpec, LinkSpec, parse, parse_rate

__all__ = ["Cluster", "ClusterError", "ClusterSpec", "LinkSpec", "parse", "parse_rate", "unavailable_reason"]
