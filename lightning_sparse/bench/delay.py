"""The process that delays what hosts receive.  It is started by its path and imports nothing of the package.

A rule of each host's packet filter hands the packets that arrive on ``eth0`` to a queue in the kernel, of which this
process reads no more than their IP headers.  It accepts each packet when its time has come; until then it lies in the
kernel, whole as TCP's offloads left it.  That is behind the limiters of both ends: a delay costs nothing of a rate.
(``netem`` would take the limiters' place and share their queue, and not every kernel has it.)
"""

import ctypes
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

_FILTER, _QUEUE = 10 << 8, 3 << 8  # message types of nf_tables and of nfnetlink_queue
_QUEUED = struct.pack("=H", _QUEUE)
_REQUEST, _ACKNOWLEDGE, _CREATE, _APPEND = 1, 4, 0x400, 0x800
_ADDRESS = slice(-8, -4)  # of the sender: packets end with the IP header's 20 bytes
_ID = slice(24, 28)  # of a packet, after the headers of netlink, nfnetlink and the first attribute
_MOST_WAITING = 1 << 17  # packets; more are lost
_MOST_AT_ONCE = 1_000  # verdicts, which must fit in the buffer of a socket
_BUFFER_BYTES = 4 << 20
_MANY, _PAUSE_S = 32, 0.00025  # with many waiting, wake up for several at once: less than half the cost
_WAY_S = 0.00005  # that a packet takes through here at the least: twice waking up, on a quick machine


def _attribute(kind: int, *values: bytes) -> bytes:
    value = b"".join(values)
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(0x8000 | kind, *attributes)


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _message(kind: int, flags: int, *attributes: bytes, family: int = socket.AF_INET, subsystem: int = 0) -> bytes:
    body = struct.pack(">BBH", family, 0, subsystem) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 0, 0) + body


_ACCEPT = _message(_QUEUE | 1, 0, _attribute(2, struct.pack(">II", 1, 0)), family=0)[:-4]  # before a packet's id


def _ask(netlink: socket.socket, *messages: bytes) -> None:
    """Send messages, one of which asks for an acknowledgement."""
    netlink.send(b"".join(messages))
    if error := struct.unpack_from("=i", netlink.recv(1 << 16), 16)[0]:
        raise OSError(-error, os.strerror(-error))


def _add_rule(netlink: socket.socket, name: bytes, *settings: bytes) -> None:
    """Have the filter hand what arrives on another interface than loopback to its expression ``name``."""

    def expression(name: bytes, *settings: bytes) -> bytes:
        return _nested(1, _attribute(1, name, b"\0"), _nested(2, *settings))

    table, chain, new = b"delay\0", b"input\0", _CREATE
    input_hook = _nested(4, _number(1, 1), _number(2, 0))
    load_interface = expression(b"meta", _number(1, 1), _number(2, 4))
    unless_first = expression(b"cmp", _number(1, 1), _number(2, 1), _nested(3, _attribute(1, struct.pack("=I", 1))))
    rule = _nested(4, load_interface, unless_first, expression(name, *settings))
    _ask(
        netlink,
        _message(16, 0, family=0, subsystem=10),  # begins a batch
        _message(_FILTER, new, _attribute(1, table)),
        _message(_FILTER | 3, new, _attribute(1, table), _attribute(3, chain), input_hook, _attribute(7, b"filter\0")),
        _message(_FILTER | 6, new | _APPEND | _ACKNOWLEDGE, _attribute(1, table), _attribute(2, chain), rule),
        _message(17, 0, family=0, subsystem=10),  # ends it
    )


def _queue() -> socket.socket:
    """Have the kernel queue what this network namespace receives; returns the socket to read from."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)  # netfilter
    for option in (8, 33):  # SO_RCVBUF, and SO_RCVBUFFORCE where this is root
        with suppress(PermissionError):
            netlink.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    netlink.setsockopt(270, 5, 1)  # NETLINK_NO_ENOBUFS: what does not fit is lost, as in any queue
    bind = _attribute(1, struct.pack(">BBH", 1, 0, socket.AF_INET))
    headers_only = _attribute(2, struct.pack(">IB", 20, 2))
    keep_segments = _number(4, 4) + _number(5, 4)
    _ask(netlink, _message(_QUEUE | 2, _ACKNOWLEDGE, bind, headers_only, keep_segments, _number(3, _MOST_WAITING)))
    try:
        _add_rule(netlink, b"queue", _attribute(1, bytes(2)))
    except FileNotFoundError:  # a kernel without nft_queue; iptables' target does the same
        _add_rule(netlink, b"target", _attribute(1, b"NFQUEUE\0"), _number(2, 0), _attribute(3, bytes(2)))
    netlink.setblocking(False)
    return netlink


def _tune(window_bytes: int) -> None:
    """Let TCP have so many bytes under way, and keep its window after a pause, as on hosts with such a link."""
    settings = Path("/proc/sys/net/ipv4")
    with suppress(OSError):  # not to be changed here
        for name in ("tcp_rmem", "tcp_wmem"):
            least, first, most = map(int, (settings / name).read_text().split())
            (settings / name).write_text(f"{least} {first} {max(most, window_bytes)}")
        (settings / "tcp_slow_start_after_idle").write_text("0")


def serve(queues: list[socket.socket], delays_s: list[dict[bytes, float]]) -> None:
    """Accept each packet after its delay, by receiver and sender."""
    receivers = {queue: number for number, queue in enumerate(queues)}
    waiting: list[tuple[float, int, bytes]] = []  # when it is due, its receiver, its id
    while True:
        if len(waiting) > _MANY:
            time.sleep(_PAUSE_S)
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(queues, [], [], timeout_s)
        for queue in ready:
            now_s, receiver = time.monotonic(), receivers[queue]
            from_address_s = delays_s[receiver]
            with suppress(BlockingIOError):
                while True:
                    packet = queue.recv(256)
                    if packet[4:6] == _QUEUED:
                        heapq.heappush(waiting, (now_s + from_address_s[packet[_ADDRESS]], receiver, packet[_ID]))
        verdicts: dict[int, bytearray] = {}
        now_s, left = time.monotonic(), _MOST_AT_ONCE
        while waiting and waiting[0][0] <= now_s and left:
            _, receiver, number = heapq.heappop(waiting)
            verdicts.setdefault(receiver, bytearray()).extend(_ACCEPT + number)
            left -= 1
        for receiver, messages in verdicts.items():
            queues[receiver].send(messages)


def main() -> None:
    """Set up every host's queue and say so, then serve."""
    hosts = json.loads(sys.argv[1])  # of each: its namespace, bytes under way, and the seconds from each address
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    queues = []
    try:
        for path, window_bytes, _ in hosts:
            _enter(os.open(path, os.O_RDONLY))
            _tune(window_bytes)
            queues.append(_queue())
    except OSError as error:
        sys.exit(f"{error}")
    _enter(own)
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: wake to the nanosecond, not within 50 us
    with suppress(PermissionError):  # only root's packets need not wait for a processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    serve(queues, [{socket.inet_aton(a): max(0.0, s - _WAY_S) for a, s in delays.items()} for _, _, delays in hosts])


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns failed")
    os.close(namespace)


if __name__ == "__main__":
    main()
