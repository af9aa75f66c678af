"""What ``lightning-sparse doctor`` prints.  Pure functions."""

from collections.abc import Sequence
from statistics import median

from rich.table import Column, Table

from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.doctor.host import Host
from lightning_sparse.bench.output import new_table
from lightning_sparse.monitor.tables import human_bytes

STEPS = 10  # of each strategy


def surroundings(host: Host, place: Place | None, emulate: str, cannot_emulate: str | None) -> Table:
    """Show this host, and what ranks use."""
    triton = "Triton's" if host.triton else "PyTorch's; Triton's are faster: pip install triton"
    ranks = "neither torchrun nor srun started this: one machine"
    if emulate:
        ranks = f"one on each host of {emulate}"
    elif place is not None:
        ranks = f"{place.size} on {counted(place.hosts, 'host')}; rank 0 at {place.address}:{place.port}"
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in host.versions.items()),
        "machine": f"{host.system}, {host.cores} cores, {host.load:.1f} programs running",
        "devices": f"{counted(host.devices, 'CUDA device')}: ranks train on CUDA, over NCCL {host.nccl}"
        if host.devices
        else "no CUDA device: ranks train on the CPU, over Gloo",
        "kernels": triton if host.devices else "NumPy's and PyTorch's, on the CPU",
        "interfaces": ", ".join(f"{name} {address}" for name, address in host.interfaces.items()),
        "used": _used(host, place, emulate),
        "ranks": ranks,
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
    known = {address: name for name, address in host.interfaces.items()}
    used = "loopback" if host.own_address.startswith("127.") else known.get(host.own_address, "not known")
    return f"{used}, where this host's name leads ({host.own_address or 'nowhere'}), unless GLOO_SOCKET_IFNAME is set"


def counted(count: int, what: str) -> str:
    """Write "1 host" or "2 hosts"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


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
