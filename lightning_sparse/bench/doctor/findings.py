"""What is wrong, and what to do about it.  Pure functions."""

from collections.abc import Sequence

from lightning_sparse.bench.compare.report import Round
from lightning_sparse.bench.doctor.hosts import Host

WITHDRAWN = ("2.6.2", "2.6.3")  # versions of Lightning


def of_hosts(hosts: Sequence[Host], emulated: bool) -> list[str]:
    """Say what is wrong with the hosts; nothing if they are as they must be."""
    found = [problem for host in hosts for problem in _of_host(host)]
    for name in sorted({name for host in hosts for name in host.versions}):
        versions = {host.versions.get(name, "none") for host in hosts}
        if len(versions) > 1:
            which = ", ".join(f"{host.name} {host.versions.get(name, 'none')}" for host in hosts)
            found.append(f"{name} must be of one version on every host; got {which}. Install the same everywhere.")
    if len({len(host.devices) for host in hosts}) > 1:
        which = ", ".join(f"{host.name} {len(host.devices)}" for host in hosts)
        found.append(f"every host must have as many CUDA devices; got {which}.")
    if len(hosts) > 1 and not emulated:
        found += [problem for host in hosts if (problem := _loopback(host))]
    return found


def _of_host(host: Host) -> list[str]:
    found = []
    for package in ("lightning", "pytorch_lightning"):
        if host.versions.get(package) in WITHDRAWN:
            found.append(
                f"{host.name}: {package} {host.versions[package]} was withdrawn by its makers. pip install "
                f"--upgrade {package.replace('_', '-')}"
            )
    if host.devices and not host.nccl:
        found.append(
            f"{host.name}: PyTorch must have NCCL to train on its CUDA devices; this build has none. Install "
            "PyTorch's own build for CUDA (https://pytorch.org/get-started/locally)."
        )
    known = ", ".join(host.interfaces)
    if host.gloo and not set(host.gloo.split(",")) <= host.interfaces.keys():
        found.append(f"{host.name}: GLOO_SOCKET_IFNAME must be one of {known}; got {host.gloo!r}. Correct or unset it.")
    prefixes = host.nccl_interface.split(",")
    if host.nccl_interface[:1] not in ("", "^", "=") and not any(
        name.startswith(prefix) for name in host.interfaces for prefix in prefixes
    ):
        found.append(
            f"{host.name}: NCCL_SOCKET_IFNAME must be how one of {known} begins; got {host.nccl_interface!r}. Correct "
            "or unset it."
        )
    return found


def _loopback(host: Host) -> str:
    """Say so if Gloo would give the other hosts an address that leads back to themselves."""
    if host.gloo or not host.own_address.startswith("127."):
        return ""
    others = [name for name, address in host.interfaces.items() if not address.startswith("127.")]
    return (
        f"{host.name}: its own name leads to {host.own_address}, which Gloo would tell the other hosts. export "
        f"GLOO_SOCKET_IFNAME={others[0] if others else '...'} on it before training."
    )


def of_rounds(rounds: Sequence[Round]) -> list[str]:
    """Say which strategies failed."""
    return [f"{each.strategy} failed: {each.error}" for each in rounds if each.error]


def of_link(error: Exception, address: str, port: int) -> str:
    """Say what to do where hosts did not find each other."""
    answer = next(iter(str(error).split("\n")), "")
    return (
        f"the hosts must reach each other, and rank 0 at {address}:{port}; got {answer!r}. "
        "Start the command on every host; open the ports between them; name the interface with --interface, or "
        "GLOO_SOCKET_IFNAME (docs/multi-node.md, Ports)."
    )


def of_address(address: str, port: int, error: str) -> str:
    """Say what to do where MASTER_ADDR cannot be reached."""
    return (
        f"MASTER_ADDR must be a host that answers; got {address!r}, port {port}: {error}. Correct it, or unset it to "
        "train on this machine alone."
    )
