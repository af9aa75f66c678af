"""Network namespaces, each held by a process that reads from a pipe.

When the pipe ends, because its creator died, however that was, the holder kills what runs in its namespace and ends,
and the namespace with it.  A user who is not root gets a user namespace around them.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_sparse.bench.cluster.available import NEW_USER, ClusterError, capable, find

_HOLD = """
echo ready
exec > /dev/null 2>&1  # nobody reads it
read never  # by the shell itself: no process of its own is in the namespace to be killed
for i in 1 2 3; do  # what was starting another process is gone the first time, that process the next
  for process in /proc/[0-9]*; do
    [ $process != /proc/$$ ] && [ $process/ns/net -ef /proc/$$/ns/net ] && kill -9 ${process#/proc/}
  done
done
"""


class Namespaces:
    """The network namespaces of one cluster, and what runs in them."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        self._entry: list[str] = []  # the command that enters the user namespace, where there is one

    @property
    def paths(self) -> list[str]:
        """Where they are, in the order in which they were made."""
        return [f"/proc/{holder.pid}/ns/net" for holder in self._holders]

    def add(self) -> str:
        """Make one; returns its path."""
        unshare = [find("unshare") or "unshare", "--net"]
        if not capable() and not self._holders:
            unshare.extend(NEW_USER)
        command = [*self._entry, *unshare, "sh", "-c", _HOLD]
        self._holders.append(start(command, subprocess.PIPE, "cannot make a network namespace"))
        if not capable():
            user = f"--user=/proc/{self._holders[0].pid}/ns/user"
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
        """Kill every process in the namespaces and wait, at most 5 seconds, until they are gone."""
        deadline_s = time.monotonic() + 5
        while (pids := self.pids_inside(paths)) and time.monotonic() < deadline_s:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def pids_inside(self, paths: Sequence[str]) -> list[int]:
        """Ids of the processes in the namespaces, without those that hold them."""
        wanted = {_identity(Path(path)) for path in paths} - {None}
        holders = {holder.pid for holder in self._holders}
        pids = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()} if wanted else set()
        return [pid for pid in pids - holders if _identity(Path(f"/proc/{pid}/ns/net")) in wanted]

    def remove(self) -> None:
        """Kill what runs in the namespaces, then their holders, and with them the namespaces."""
        self.kill_inside(self.paths)
        for holder in self._holders:
            holder.kill()
            holder.wait()
            holder.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._holders.clear()
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


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # gone meanwhile
    return status.st_dev, status.st_ino
