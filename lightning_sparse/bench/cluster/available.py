"""Whether a cluster can be built here, and what to do where none can."""

import os
import re
import shutil
import subprocess
from pathlib import Path

NEW_USER = ("--user", "--map-root-user")  # what unshare needs where this is not root
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_CAPABILITIES = (12, 21)  # CAP_NET_ADMIN, CAP_SYS_ADMIN: bit numbers of CapEff in /proc/self/status
# What may forbid user namespaces: a setting of the kernel, the value that does, and one that allows them.
_FORBIDDING = (
    ("user.max_user_namespaces", "0", "15000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)


class ClusterError(RuntimeError):
    """A cluster could not be built or used, or a command in a host failed; the message says why and what to do."""


def find(tool: str) -> str | None:
    """Path of ``ip``, say."""
    # The tools' folders are not on every user's PATH.
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def capable() -> bool:
    """Whether this process may make network namespaces, as root may; else it needs a user namespace for them."""
    status = Path("/proc/self/status")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text() if status.exists() else "", re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return all(mask >> bit & 1 for bit in _CAPABILITIES)


def unavailable_reason() -> str | None:
    """Say why no cluster can be built here and what to do about it; None if one can."""
    for tool, package in _PACKAGES.items():
        if find(tool) is None:
            return (
                f"an emulated cluster needs Linux and {package}, but {tool!r} is not found: apt-get install {package}"
            )
    if capable():
        return None
    # What this process may do is seen best by doing it.
    attempt = [find("unshare") or "unshare", *NEW_USER, "--net", find("ip") or "ip", "link", "set", "lo", "up"]
    tried = subprocess.run(attempt, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode == 0:
        return None
    allow = [f"{name}={allows}" for name, forbids, allows in _FORBIDDING if _setting(name) == forbids]
    return (
        "an emulated cluster needs root, or a user namespace, which this process may not make "
        f"({tried.stderr.strip()}): run with sudo, in a container with --privileged, or "
        + (f"allow them: sudo sysctl {' '.join(allow)}" if allow else "ask who forbids user namespaces here")
    )


def _setting(name: str) -> str | None:
    path = Path("/proc/sys", name.replace(".", "/"))
    return path.read_text().strip() if path.exists() else None
