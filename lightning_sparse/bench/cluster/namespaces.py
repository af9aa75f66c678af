"""Network namespaces: whether they can be made here, and those of a cluster, each held by a process that reads a pipe.

When the pipe ends, because its creator ended, however that was, the process kills what runs in its namespace and ends,
and the namespace with it.  A user who is not root gets a user namespace around them.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_NEW_USER = ("--user", "--map-root-user")  # what unshare needs where this is not root
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_CAPABILITIES = (12, 21)  # CAP_NET_ADMIN, CAP_SYS_ADMIN: bit numbers of CapEff in /proc/self/status
# Kills what runs in the namespace of this shell, but for itself and process $1, again and again until nothing is left.
_KILL = """
left=99
while [ $left -gt 0 ]; do
  more=0
  for process in /proc/[0-9]*; do
    [ $process != /proc/$$ ] && [ $process != /proc/$1 ] && [ $process/ns/net -ef /proc/$$/ns/net ] || continue
    kill -9 ${process#/proc/}
    more=$((left - 1))
  done
  left=$more
done
"""
_HOLD = f"""
echo ready
exec > /dev/null 2>&1  # nobody reads it
read never  # by the shell itself: no process of its own is in the namespace to be killed
{_KILL}"""


class ClusterError(OSError):
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
    attempt = [find("unshare") or "unshare", *_NEW_USER, "--net", find("ip") or "ip", "link", "set", "lo", "up"]
    tried = subprocess.run(attempt, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode == 0:
        return None
    return (
        "an emulated cluster needs root, or a user namespace, which this process may not make "
        f"({tried.stderr.strip()}): run with sudo, in a container with --privileged, or allow user namespaces "
        "(docs/measuring.md, Without root)"
    )


class Namespaces:
    """The network namespaces of one cluster, and what runs in them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._entry: list[str] = []  # the command that enters the user namespace, where there is one

    @property
    def paths(self) -> list[str]:
        """Where they are, in the order in which they were made."""
        return [f"/proc/{process.pid}/ns/net" for process in self._processes]

    def add(self) -> str:
        """Make one; returns its path."""
        unshare = [find("unshare") or "unshare", "--net"]
        if not capable() and not self._processes:
            unshare.extend(_NEW_USER)
        command = [*self._entry, *unshare, "sh", "-c", _HOLD]
        self._processes.append(start(command, subprocess.PIPE, "cannot make a network namespace"))
        if not capable():
            user = f"--user=/proc/{self._processes[0].pid}/ns/user"
            self._entry = [find("nsenter") or "nsenter", user, "--preserve-credentials"]
        self.run(self.paths[-1], "ip", "link", "set", "lo", "up")
        return self.paths[-1]

    def command(self, path: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs another in a namespace, under the same process id."""
        return [*(self._entry or [find("nsenter") or "nsenter"]), f"--net={path}", *argv]

    def run(self, path: str, tool: str, *arguments: str) -> str:
        """Run ``ip`` or ``tc`` in a namespace; returns what it wrote."""
        # In a session of its own: a Ctrl-C in the terminal must not stop it halfway.
        done = subprocess.run(
            self.command(path, [find(tool) or tool, *arguments]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            start_new_session=True,
            check=False,
        )
        if done.returncode != 0:
            command = " ".join([tool, *arguments])
            raise ClusterError(f"{command!r} failed with status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def kill_inside(self, paths: Sequence[str]) -> None:
        """Kill every process in the namespaces but those that hold them, and wait until they are gone."""
        for path in filter(os.path.exists, paths):
            self.run(path, "sh", "-c", _KILL, "sh", path.split("/")[2])

    def remove(self) -> None:
        """Kill what runs in the namespaces, then what holds them, and with that the namespaces."""
        self.kill_inside(self.paths)
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._processes.clear()
        self._entry.clear()


def start(command: Sequence[str], stdin: int, what: str) -> "subprocess.Popen[str]":
    """Start a process of the cluster's own, and wait until it says that it is ready; ``what`` begins its error."""
    output, merged = subprocess.PIPE, subprocess.STDOUT
    # In a session of its own: a Ctrl-C in the terminal must not end it.
    process = subprocess.Popen(command, stdin=stdin, stdout=output, stderr=merged, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as written:
        said = written.readline()
        if said == "ready\n":
            return process
        process.kill()
        said += written.read()
    process.wait()
    raise ClusterError(f"{what}: {said.strip()}")
