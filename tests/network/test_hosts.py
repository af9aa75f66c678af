"""The address of a host of an elastic training, and what is said where others cannot reach one."""

import socket
from datetime import timedelta

import pytest

from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.hosts import Hosts, _parts, own_address

pytest.importorskip("torchft")
INTERFACE, LIGHTHOUSE = "GLOO_SOCKET_IFNAME", "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("interface", "address", "expected"),
    [
        (None, None, "127.0.0.1"),
        ("", None, "127.0.0.1"),
        ("lo", None, "127.0.0.1"),
        ("lo,nowhere", None, "127.0.0.1"),
        (None, "127.0.0.2", "127.0.0.2"),
        ("nowhere", "127.0.0.2", "127.0.0.2"),
        ("lo", "localhost", socket.getaddrinfo("localhost", 0)[0][4][0]),
    ],
)
def test_an_address_is_the_one_given_or_of_an_interface_or_leads_to_the_lighthouse(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, address: str | None, expected: str
) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    if interface is not None:
        monkeypatch.setenv(INTERFACE, interface)
    assert own_address(Elastic(lighthouse=LIGHTHOUSE, address=address)) == expected


def test_an_address_that_this_host_does_not_have_is_refused_at_the_first_meeting() -> None:
    expected = r"address must be one of this host, or its name; got '203\.0\.113\.77': .*Give each host its own"
    with pytest.raises(ValueError, match=expected):
        Hosts(Elastic(lighthouse=LIGHTHOUSE, address="203.0.113.77"), dict).meet(0)
    with pytest.raises(ValueError, match=r"got 'nowhere\.invalid': .*known"):
        Hosts(Elastic(lighthouse=LIGHTHOUSE, address="nowhere.invalid"), dict).meet(0)


def test_an_interface_that_this_host_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "ib99,lo")
    with pytest.raises(
        ValueError, match=rf"{INTERFACE} must be an interface of this host .*lo.*; got 'ib99'\. Correct"
    ):
        Hosts(Elastic(lighthouse=LIGHTHOUSE), dict).meet(0)


def test_an_address_must_be_text() -> None:
    for wrong in ("", 3):
        with pytest.raises(ValueError, match="Elastic: address must be an address of this host"):
            Elastic(address=wrong)  # type: ignore[arg-type]


def test_who_cannot_be_asked_for_weights_is_named() -> None:
    _, transport = _parts("127.0.0.1", timedelta(seconds=1))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{closed.getsockname()[1]}/checkpoint/"
        with pytest.raises(OSError, match=rf"{where}: .*refused"):
            transport.recv_checkpoint(0, where, step=3, timeout=timedelta(seconds=1))
    assert transport.metadata().startswith("http://127.0.0.1:")
    transport.shutdown(wait=False)
