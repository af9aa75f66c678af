"""What is wrong with hosts, and what to do about it.  Pure functions."""

from collections.abc import Sequence

from lightning_sparse.bench.doctor.hosts import Host

WITHDRAWN = ("2.6.2", "2.6.3")  # versions of Lightning


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
    found = [
        f"{package} {host.versions[package]} was withdrawn by its makers. pip install --upgrade "
        f"{package.replace('_', '-')}"
        for package in ("lightning", "pytorch_lightning")
        if host.versions.get(package) in WITHDRAWN
    ]
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
