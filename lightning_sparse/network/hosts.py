"""The hosts that train together now: torchft's manager finds them, and has a process group made among them."""

import logging
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.host_ranks import HostRanks

RETRY_S = 0.5  # from one look for a lighthouse that is gone to the next
INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's own variable
SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface
LINK_LOCAL = "20"  # the scope of IPv6 addresses that are of use only with the name of an interface
TO_CONNECT = 5  # times its time limit, which Gloo waits for another host to connect


class Hosts:
    """This host among all that train, as torchft's lighthouse knows them.  P = ``size``.

    Before each exchange the hosts meet: those that are alive and have come are its members, and get a process group if
    they are others than before, or if an exchange has failed.  Who is behind the furthest gets what that one saves.

    All ranks of a host meet, and each has a process group with those of the same number in the other hosts, and gets
    what such a one saves.  torchft's server in the first rank waits for all of them, so each step is agreed before and
    after: who asks once more alone would wait in vain.

    Args:
        settings: where the lighthouse is, and how long to wait.
        save: returns what a host needs that is behind; asked on another thread while this one is in :meth:`meet`.
        ranks: of this host, for the thread that meets.

    Raises:
        ModuleNotFoundError: torchft is not installed.
        ValueError: nobody says where the lighthouse is.
    """

    def __init__(self, settings: Elastic, save: Callable[[], object], ranks: HostRanks | None = None) -> None:
        _import_torchft()
        self._settings, self._save, self._ranks = settings, save, ranks or HostRanks()
        self._lighthouse = settings.found_lighthouse()
        self.key = self._ranks.of_first(random.SystemRandom().getrandbits(62))  # of this start of this host
        self.address = ""  # that it tells the others, from the first meeting on
        self.failure = ""  # why no messages can be sent after the last meeting, as far as it is known
        self._received: object = None
        self._manager: Any = None  # from the first meeting on: others wait for a host that has one
        self._group: Any = None
        self._store: Any = None

    @property
    def rank(self) -> int:
        rank: int | None = self._manager.participating_rank()
        assert rank is not None  # who has met takes part
        return rank

    @property
    def size(self) -> int:
        """P, hosts of the last meeting."""
        return int(self._manager.num_participants())

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the last meeting, over Gloo, for those who were there."""
        group: dist.ProcessGroup = self._group.parent
        return group

    @property
    def was_made_anew(self) -> bool:
        """Whether the process group was made in the last meeting."""
        return bool(self._group.made_anew)

    def meet(self, committed: int) -> bool:
        """Wait for the other hosts; returns whether this rank can send messages.  ``committed`` says how far it is.

        Raises:
            RuntimeError: there was no lighthouse, or there were too few hosts, for ``quorum_timeout``.
        """
        try:
            if self._manager is None:
                self._start()
            self._group.made_anew = False
            try:
                self._ask(committed)
            except (RuntimeError, TimeoutError):  # this host may have stood still meanwhile, and not have waited
                self._ask(committed, self._settings.limit)
            end_s = time.monotonic() + self._settings.quorum_timeout
            while self.size < self._settings.min_hosts and self._ranks.all(self._manager.errored() is None):
                if not self._ranks.all(time.monotonic() <= end_s):
                    raise TimeoutError(f"{self.size} are there")
                time.sleep(RETRY_S)
                self._ask(committed)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(
                f"at least {self._settings.min_hosts} hosts must meet at the lighthouse {self._lighthouse} within "
                f"{self._settings.quorum_timeout:g} s, and as many as it waits for; got: {error}. Look whether it "
                "runs, with which --min_replicas, and whether half of the hosts are alive and do not come; then start "
                "this host again."
            ) from None
        failed = self._manager.errored()
        self.failure = str(failed.original_exception).partition("\n")[0].rstrip(".") if failed else ""
        return failed is None and self._group.is_open

    def take_received(self) -> Any:
        """What the furthest host has saved, if this one was behind in the last meeting; else None."""
        received, self._received = self._received, None
        return received

    def commit(self, error: Exception | None = None) -> bool:
        """Say how the exchange after the last meeting has ended; returns whether it counts, on every rank."""
        if not self._ranks.all(error is None):
            self._manager.report_error(error or RuntimeError("another rank of this host has lost a message"))
        counts = None
        with suppress(RuntimeError, TimeoutError):  # this host, which asks none but itself, has stood still meanwhile
            counts = self._manager.should_commit()
        return bool(counts if self._ranks.all(counts is not None) else self._manager.should_commit())

    def leave(self) -> None:
        """Close the connections to the other hosts, so that none waits for this one; to be followed by a meeting."""
        if self._group is not None:
            self._group.abort()

    def end(self) -> None:
        """Be found no more; whatever is under way on other threads fails."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._group.abort(errored=False)

    def close(self) -> None:
        """End this host's part."""
        self.end()
        self._manager = None

    def _ask(self, committed: int, limit: timedelta | None = None) -> None:
        """Ask who is there, for up to ``quorum_timeout``, or ``limit``."""
        self._manager.load_state_dict({"step": committed, "batches_committed": 0})
        failure = None
        try:
            self._manager.start_quorum(timeout=limit)
        except (RuntimeError, TimeoutError) as error:
            failure, self._manager._quorum_future = error, None  # else it raises the same again
        self._ranks.check(failure)

    def _start(self) -> None:
        settings, address = self._settings, own_address(self._settings)
        self.address = address
        limit, is_first = settings.limit, self._ranks.rank == 0
        group, transport = _parts(address, limit)
        if is_first:
            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        where = self._ranks.of_first((address, self._store.port if is_first else 0))
        self._group = group
        start = partial(
            _import_torchft().Manager,
            pg=group,
            load_state_dict=lambda state: setattr(self, "_received", state),
            state_dict=self._save,
            min_replica_size=settings.min_hosts,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=timedelta(seconds=settings.quorum_timeout),
            connect_timeout=limit,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            store_addr=where[0],
            store_port=where[1],
            init_sync=False,  # else the ranks of a host would start from the weights of different hosts
            lighthouse_addr=self._lighthouse,
            replica_id=settings.name(),
            hostname=_in_url(address),
            checkpoint_transport=transport,
            quorum_retries=round(settings.quorum_timeout / RETRY_S),
        )
        failure, end_s = None, time.monotonic() + settings.quorum_timeout
        while is_first and self._manager is None and failure is None:
            try:
                self._manager = start()
            except (RuntimeError, TimeoutError) as error:  # there is no lighthouse yet
                if time.monotonic() > end_s:
                    failure = error
                time.sleep(RETRY_S)
        self._ranks.check(failure)  # the others find the first one's server
        self._manager = self._manager or start()


def _import_torchft() -> Any:
    os.environ.setdefault("RUST_LOG", "warn")  # else it writes several lines in every step
    try:
        import torchft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'elastic trainings need torchft; {error}. In a checkout of this project: pip install ".[elastic]"'
        ) from None
    logger = logging.getLogger("torchft")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)  # it warns at each new process group that NCCL has no flight recorder
    return torchft


def _parts(address: str, limit: timedelta) -> tuple[Any, Any]:
    """A process group over Gloo that tells when it is made anew, and what hands states on, found at ``address``."""
    from torchft import ProcessGroupGloo
    from torchft.checkpointing import HTTPTransport

    class Gloo(ProcessGroupGloo):  # type: ignore[misc]  # nobody looks into torchft
        made_anew = False
        is_open = False  # what is closed stays so where a lighthouse that was started again gives the same number

        def configure(self, *args: Any, **kwargs: Any) -> None:
            super().configure(*args, **kwargs)
            self.made_anew = self.is_open = True

        def abort(self, *args: Any, **kwargs: Any) -> None:
            self.is_open = False
            super().abort(*args, **kwargs)

        def _create_pg(self, store: Any, rank: int, size: int) -> dist.ProcessGroup:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it has no public name
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit / TO_CONNECT
            store.set(f"address/{rank}", address)
            try:
                backend = dist.ProcessGroupGloo(store, rank, size, options)
            except RuntimeError as error:
                raise RuntimeError(f"{error}; hosts that have come: {_come(store, size)}") from None
            backend._set_sequence_number_for_group()
            group = dist.ProcessGroup(store, rank, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

    class Transport(HTTPTransport):  # type: ignore[misc]
        def address(self) -> str:  # torchft gives the host's name, which others may not know
            return str(super().address()).replace(f"//{socket.gethostname()}:", f"//{_in_url(address)}:", 1)

        def recv_checkpoint(self, src_rank: int, metadata: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().recv_checkpoint(src_rank, metadata, *args, **kwargs)
            except OSError as error:  # which does not say where
                raise OSError(f"{metadata}: {error}") from error

    return Gloo(timeout=limit), Transport(timeout=limit, num_chunks=0)


def _come(store: Any, size: int) -> str:
    """The addresses of the hosts that have begun to connect."""
    keys = (f"address/{rank}" for rank in range(size))
    return ", ".join(store.get(key).decode() for key in keys if store.check([key]))


def own_address(settings: Elastic) -> str:
    """The address of this host that it tells the others.

    Raises:
        ValueError: it has no such address.
    """
    if settings.address is not None:
        return _resolved(settings.address)
    if name := os.environ.get(INTERFACE, "").split(",")[0]:
        return _of_interface(name)
    return _towards(settings.found_lighthouse())


def _resolved(address: str) -> str:
    """The address in digits, of this host."""
    reason = "it is none of this host's"
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    except OSError as error:
        reason = str(error)
    raise ValueError(
        f"Elastic: address must be one of this host, or its name; got {address!r}: {reason}. Give each host its own "
        f"(`ip address` shows them), or none and {INTERFACE}."
    )


def _of_interface(name: str) -> str:
    """The address of an interface: that of IPv4 if there is one, else that of IPv6."""
    import fcntl  # not on Windows, for which there is no torchft

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, owner = line.split()
            if owner == name and scope != LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    known = ", ".join(other for _, other in socket.if_nameindex())
    raise ValueError(
        f"{INTERFACE} must be an interface of this host that has an address, of {known}; got {name!r}. Correct or "
        "unset it, or give Elastic(address=...)."
    )


def _towards(lighthouse: str) -> str:
    """The address of this host on the network that leads to the lighthouse."""
    url = urlsplit(lighthouse)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"the lighthouse must have an address that this host can reach; got {lighthouse}: {error}. Correct "
            "it, or the network."
        ) from error


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
