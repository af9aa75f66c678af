"""Clusters as text, such as ``4x1gbit``: hosts and the rates of their links."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

RATE_FORMS = "a number and a unit, such as '100mbit', '2.5gbit' or '1gbit' (bit, kbit, mbit, gbit), or 'unlimited'"
DELAY_FORMS = "a number and a unit, such as '50ms' or '0.5ms' (us, ms, s)"
SPEC_FORMS = (
    "'4x1gbit' (4 hosts), '4x100mbit+50ms' (50 ms from each host to another), '3x1gbit+1x100mbit' (hosts of different "
    "rates) or '2x2x10gbit/1gbit' (2 groups of 2 hosts, 10gbit inside a group, 1gbit between groups)"
)
MOST_HOSTS = 254
_HOP_S = 0.0002  # a message's way to the next rank, where a link is given and not measured
_QUEUES_S = 0.05  # that packets may wait on their way
_UNITS_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class LinkSpec:
    """A link."""

    rate_bits_per_s: int | None = None  # None: no limit
    delay_s: float = 0.0  # one way, between two hosts with such links: half of it is on each


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts and their links."""

    groups: tuple[tuple[LinkSpec, ...], ...]  # the link of each host, by group
    trunk: LinkSpec = LinkSpec()  # that joins each group to the others

    def __post_init__(self) -> None:
        if self.hosts > MOST_HOSTS:
            raise ValueError(f"a cluster must have at most {MOST_HOSTS} hosts; got {self.hosts}")
        if self.trunk != LinkSpec() and len(self.groups) == 1:
            raise ValueError("a link between groups needs at least 2 groups; got 1")

    @property
    def hosts(self) -> int:
        return len(self._links)

    @property
    def s_per_byte(self) -> float:
        """Seconds that a byte takes on the slowest link; 0 if no link is limited."""
        rates = [link.rate_bits_per_s for link in (*self._links, self.trunk) if link.rate_bits_per_s]
        return 8 / min(rates) if rates else 0.0

    @property
    def hop_s(self) -> float:
        """Seconds that a message takes to the next rank besides its bytes' time, at most."""
        return _HOP_S + self.longest_delay_s

    @property
    def longest_delay_s(self) -> float:
        """Seconds between the two hosts that are farthest apart, one way."""
        longest = sorted(link.delay_s for link in self._links)[-2:]
        return sum(longest) / len(longest) + self.trunk.delay_s

    @property
    def window_bytes(self) -> int:
        """What TCP's buffers must hold, with its own overhead, for one stream to fill the fastest link."""
        rate_bits_per_s = max(link.rate_bits_per_s or 10**9 for link in self._links)
        return min(round(4 * rate_bits_per_s / 8 * (2 * self.longest_delay_s + _QUEUES_S)), 2**30)

    def delay_s(self, source: int, target: int) -> float:
        group = [number for number, links in enumerate(self.groups) for _ in links]
        between = self.trunk.delay_s if group[source] != group[target] else 0.0
        return (self._links[source].delay_s + self._links[target].delay_s) / 2 + between

    @property
    def _links(self) -> list[LinkSpec]:
        return [link for group in self.groups for link in group]


def words(link: LinkSpec) -> str:
    """Describe a link."""
    rate = f"{link.rate_bits_per_s / 1e6:g} Mbit/s" if link.rate_bits_per_s else "no limit"
    return f"{rate} and {1e3 * link.delay_s:g} ms" if link.delay_s else rate


def parse(text: str) -> ClusterSpec:
    """Read a cluster's text form, one of ``SPEC_FORMS``; raises a ValueError for any other."""
    inside, slash, trunk = text.strip().partition("/")
    try:
        if not slash:
            # A plus before a number of hosts begins other hosts, any other one a delay.
            parts = re.split(r"\+(?=[^+]*x)", inside)
            return ClusterSpec((tuple(link for part in parts for link in _parse_hosts(part)),))
        groups, _, hosts = inside.partition("x")
        return ClusterSpec(_parse_count(groups) * (_parse_hosts(hosts),), parse_link(trunk))
    except ValueError as error:
        raise ValueError(f"cluster {text!r}: {error}. Write {SPEC_FORMS}.") from None


def parse_link(text: str) -> LinkSpec:
    """Read a rate and perhaps a delay, such as ``100mbit+50ms``; raises a ValueError for anything else."""
    rate, plus, delay = text.partition("+")
    return LinkSpec(parse_rate(rate), _parse_delay(delay) if plus else 0.0)


def parse_rate(text: str) -> int | None:
    """Read a rate, one of ``RATE_FORMS``: bits per second, or None for no limit; raises a ValueError for any other."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    rate_bits_per_s = round(_with_unit(word, _UNITS_BITS_PER_S) or 0)
    if rate_bits_per_s < 1:
        raise ValueError(f"a rate must be {RATE_FORMS}; got {text!r}")
    return rate_bits_per_s


def _parse_delay(text: str) -> float:
    delay_s = _with_unit(text, _UNITS_S)
    if delay_s is None:
        raise ValueError(f"a delay must be {DELAY_FORMS}; got {text!r}")
    return delay_s


def _with_unit(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number and one of ``units``; None if it is anything else."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower(), re.ASCII)
    return float(match[1]) * units[match[2]] if match else None


def _parse_hosts(text: str) -> tuple[LinkSpec, ...]:
    count, x, link = text.partition("x")
    if not x:
        raise ValueError(f"a number of hosts must be followed by 'x' and a rate; got {text!r}")
    return _parse_count(count) * (parse_link(link),)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,2}", text.strip(), re.ASCII):
        raise ValueError(f"a number of hosts or groups must be an integer from 1 to {MOST_HOSTS}; got {text!r}")
    return int(text)
