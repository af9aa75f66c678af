"""Clusters as text, such as ``4x1gbit``: hosts and the rates of their links."""

import re
from dataclasses import dataclass

RATE_FORMS = "a number and a unit, such as '100mbit', '2.5gbit' or '1gbit' (bit, kbit, mbit, gbit), or 'unlimited'"
SPEC_FORMS = (
    "'4x1gbit' (4 hosts), '3x1gbit+1x100mbit' (hosts of different rates) or "
    "'2x2x10gbit/1gbit' (2 groups of 2 hosts, 10gbit inside a group, 1gbit between groups)"
)
MOST_HOSTS = 254
HOP_S = 0.0002  # a message's way to the next rank, where a link is given and not measured
_UNITS_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts and the rates of their links."""

    groups: tuple[tuple[int | None, ...], ...]  # by group and host, bits per second of the host's link; None: no limit
    trunk_rate_bits_per_s: int | None = None  # of the link that joins each group to the others; None: no limit

    def __post_init__(self) -> None:
        if self.hosts > MOST_HOSTS:
            raise ValueError(f"a cluster must have at most {MOST_HOSTS} hosts; got {self.hosts}")
        if self.trunk_rate_bits_per_s is not None and len(self.groups) == 1:
            raise ValueError("a rate between groups needs at least 2 groups; got 1")

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return sum(len(group) for group in self.groups)

    @property
    def s_per_byte(self) -> float:
        """Seconds that a byte takes on the slowest link; 0 if no link is limited."""
        rates = [rate for rate in (*(r for group in self.groups for r in group), self.trunk_rate_bits_per_s) if rate]
        return 8 / min(rates) if rates else 0.0


def parse(text: str) -> ClusterSpec:
    """Read a cluster's text form, one of ``SPEC_FORMS``; raises a ValueError for any other."""
    inside, slash, trunk = text.strip().partition("/")
    try:
        if not slash:
            return ClusterSpec((tuple(rate for part in inside.split("+") for rate in _parse_hosts(part)),))
        groups, _, hosts = inside.partition("x")
        return ClusterSpec(_parse_count(groups) * (_parse_hosts(hosts),), parse_rate(trunk))
    except ValueError as error:
        raise ValueError(f"cluster {text!r}: {error}. Write {SPEC_FORMS}.") from None


def parse_rate(text: str) -> int | None:
    """Read a rate, one of ``RATE_FORMS``: bits per second, or None for no limit; raises a ValueError for any other."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", word, re.ASCII)
    rate_bits_per_s = round(float(match[1]) * _UNITS_BITS_PER_S[match[2]]) if match else 0
    if rate_bits_per_s < 1:
        raise ValueError(f"a rate must be {RATE_FORMS}; got {text!r}")
    return rate_bits_per_s


def _parse_hosts(text: str) -> tuple[int | None, ...]:
    count, _, rate = text.partition("x")
    return _parse_count(count) * (parse_rate(rate),)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,2}", text.strip(), re.ASCII):
        raise ValueError(f"a number of hosts or groups must be an integer from 1 to {MOST_HOSTS}; got {text!r}")
    return int(text)
