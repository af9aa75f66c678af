"""What ``lightning-sparse doctor`` prints, and what is wrong with hosts.  Pure functions."""

from collections.abc import Sequence
from statistics import median

from rich.table import Column, Table

from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.doctor.hosts import Host, Surroundings
from lightning_sparse.bench.output import new_table
from lightning_sparse.fusion.costs import Link
from lightning_sparse.monitor.tables import human_bytes

STEPS = 10  # of each strategy


def surroundings(found: Surroundings, place: Place | None, emulate: str, cannot_emulate: str | None) -> Table:
    """Show the first host, what ranks use, and the link between hosts."""
    first = found.hosts[0]
    kinds = ", ".join(f"{first.devices.count(name)} x {name}" for name in dict.fromkeys(first.devices))
    triton = "Triton's" if first.triton else "PyTorch's; Triton's are faster: pip install triton"
    ranks = "neither torchrun nor srun started this: one machine"
    if emulate:
        ranks = f"one on each host of {emulate}"
    elif place is not None:
        ranks = f"{place.size} on {counted(place.hosts, 'host')}; rank 0 at {place.address}:{place.port}"
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in first.versions.items()),
        "machine": f"{first.system}, {first.cores} cores, {first.load:.1f} programs running",
        "devices": f"{kinds}: ranks train on CUDA, over NCCL {first.nccl}"
        if kinds
        else "no CUDA device: ranks train on the CPU, over Gloo",
        "kernels": triton if kinds else "NumPy's and PyTorch's, on the CPU",
        "interfaces": ", ".join(f"{name} {address}" for name, address in first.interfaces.items()),
        "used": _used(first, place, emulate),
        "ranks": ranks,
        "link": _link(found),
        "emulation": "works: --emulate 4x1gbit, say" if cannot_emulate is None else f"not here: {cannot_emulate}",
    }
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _used(host: Host, place: Place | None, emulate: str) -> str:
    """Say which interface a training between hosts would use."""
    if emulate:
        return "eth0 of each emulated host"
    if place is not None:
        return f"{place.interface}, the way to rank 0"
    if host.gloo:
        return f"{host.gloo}, by GLOO_SOCKET_IFNAME"
    if host.own_address.startswith("127."):
        return f"loopback, where this host's name leads ({host.own_address}): for several hosts set GLOO_SOCKET_IFNAME"
    used = next((name for name, address in host.interfaces.items() if address == host.own_address), "not known")
    return f"{used}, where this host's name leads ({host.own_address or 'nowhere'})"


def counted(count: int, what: str) -> str:
    """Write "1 host" or "2 hosts"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _link(found: Surroundings) -> str:
    """Describe the slowest link, and the fastest where they differ."""
    if not found.links:
        return "not measured: one host. Start doctor with torchrun or srun on all, or --emulate 2x100mbit"
    hosts = [f"{host.name} ({number})" for number, host in enumerate(found.hosts)]
    slowest = max(range(len(hosts)), key=lambda i: found.links[i].s_per_byte)
    latest = max(each.latency_s for each in found.links)
    words = f"{_rate(found.links[slowest])} at least, a short message takes {1e3 * latest:.1f} ms at most (over Gloo)"
    return f"{words}; slowest from {hosts[slowest - 1]} to {hosts[slowest]}" if len(hosts) > 2 else words


def _rate(link: Link) -> str:
    mbit = 8e-6 / link.s_per_byte
    return f"{mbit / 1e3:.2f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"


def strategies(rounds: Sequence[Round], title: str) -> Table:
    """Show each strategy: the time of a step's gradients, what it sent, and whether it did what it must."""
    headings = "gradients\naveraged in", "sent", "none lost", "replicas\nequal"
    table = new_table(f"{STEPS} steps: {title}", "strategy", *headings)
    for each in rounds:
        steps = each.run.steps if each.run else []
        half = steps[len(steps) // 2 :]
        cells = [f"{median(s.ms_span for s in half):.1f} ms", human_bytes(half[-1].counted_bytes)] if half else ["", ""]
        table.add_row(each.strategy, *cells, *(["failed"] * 2 if each.error else ["yes"] * 2))
    return table


def of_hosts(hosts: Sequence[Host], emulated: bool) -> list[str]:
    """Say what is wrong with the hosts; nothing if they are as they must be."""
    found = [problem for host in hosts for problem in _of_host(host)]
    for name in sorted({name for host in hosts for name in host.versions}):
        if len({host.versions.get(name) for host in hosts}) > 1:
            which = ", ".join(f"{host.name} {host.versions.get(name, 'none')}" for host in hosts)
            found.append(f"{name} must be of one version on every host; got {which}. Install the same everywhere.")
    if len({len(host.devices) for host in hosts}) > 1:
        which = ", ".join(f"{host.name} {len(host.devices)}" for host in hosts)
        found.append(f"every host must have as many CUDA devices; got {which}.")
    if len(hosts) > 1 and not emulated:
        found += [_loopback(host) for host in hosts if not host.gloo and host.own_address.startswith("127.")]
    return found


def _of_host(host: Host) -> list[str]:
    found = []
    if host.devices and not host.nccl:
        found.append(
            "PyTorch must have NCCL to train on its CUDA devices; this build has none. Install PyTorch's own build for "
            "CUDA (https://pytorch.org/get-started/locally)."
        )
    known, prefixes = ", ".join(host.interfaces), tuple(host.nccl_interface.split(","))
    if host.gloo and not set(host.gloo.split(",")) <= host.interfaces.keys():
        found.append(f"GLOO_SOCKET_IFNAME must be one of {known}; got {host.gloo!r}. Correct or unset it.")
    if host.nccl_interface[:1] not in ("", "^", "=") and not any(name.startswith(prefixes) for name in host.interfaces):
        found.append(
            f"NCCL_SOCKET_IFNAME must be how one of {known} begins; got {host.nccl_interface!r}. Correct or unset it."
        )
    return [f"{host.name}: {problem}" for problem in found]


def _loopback(host: Host) -> str:
    """Say that Gloo would give the other hosts an address that leads back to themselves."""
    others = [name for name, address in host.interfaces.items() if not address.startswith("127.")]
    return (
        f"{host.name}: its own name leads to {host.own_address}, which Gloo would tell the other hosts. export "
        f"GLOO_SOCKET_IFNAME={others[0] if others else '...'} on it before training."
    )


def of_link(error: Exception, address: str, port: int) -> str:
    """Say what to do where hosts did not find each other."""
    answer = next(iter(str(error).split("\n")), "")
    return (
        f"the hosts must reach each other, and rank 0 at {address}:{port}; got {answer!r}. "
        "Start the command on every host; open the ports between them; name the interface with --interface, or "
        "GLOO_SOCKET_IFNAME (docs/multi-node.md, Ports)."
    )
