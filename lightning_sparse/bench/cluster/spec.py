"""Clusters as text, such as ``4x1gbit``: hosts and the rates of their links."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

RATE_FORMS = "a number and a unit, such as '100mbit', '2.5gbit' or '1gbit' (bit, kbit, mbit, gbit), or 'unlimited'"
DELAY_FORMS = "a number and a unit, such as '50ms' or '0.5ms' (us, ms, s)"
SPEC_FORMS = (
    "'4x1gbit' (4 hosts), '4x100mbit+50ms' (50 ms from each host to another) or '3x1gbit+1x100mbit' (hosts of "
    "different rates)"
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
    """Hosts, by their links to one switch."""

    links: tuple[LinkSpec, ...]

    def __post_init__(self) -> None:
        if self.hosts > MOST_HOSTS:
            raise ValueError(f"a cluster must have at most {MOST_HOSTS} hosts; got {self.hosts}")

    @property
    def hosts(self) -> int:
        return len(self.links)

    @property
    def s_per_byte(self) -> float:
        """Seconds that a byte takes on the slowest link; 0 if no link is limited."""
        rates = [link.rate_bits_per_s for link in self.links if link.rate_bits_per_s]
        return 8 / min(rates) if rates else 0.0

    @property
    def hop_s(self) -> float:
        """Seconds that a message takes to the next rank besides its bytes' time, at most."""
        return _HOP_S + self.longest_delay_s

    @property
    def longest_delay_s(self) -> float:
        """Seconds between the two hosts that are farthest apart, one way."""
        longest = sorted(link.delay_s for link in self.links)[-2:]
        return sum(longest) / len(longest)

    @property
    def window_bytes(self) -> int:
        """What TCP's buffers must hold, with its own overhead, for one stream to fill the fastest link."""
        rate_bits_per_s = max(link.rate_bits_per_s or 10**9 for link in self.links)
        return min(round(4 * rate_bits_per_s / 8 * (2 * self.longest_delay_s + _QUEUES_S)), 2**30)

    def delay_s(self, source: int, target: int) -> float:
        return (self.links[source].delay_s + self.links[target].delay_s) / 2


def words(link: LinkSpec) -> str:
    """Describe a link."""
    rate = f"{link.rate_bits_per_s / 1e6:g} Mbit/s" if link.rate_bits_per_s else "no limit"
    return f"{rate} and {1e3 * link.delay_s:g} ms" if link.delay_s else rate


def parse(text: str) -> ClusterSpec:
    """Read a cluster's text form, one of ``SPEC_FORMS``; raises a ValueError for any other."""
    try:
        # A plus before a number of hosts begins other hosts, any other one a delay.
        parts = re.split(r"\+(?=[^+]*x)", text.strip())
        return ClusterSpec(tuple(link for part in parts for link in _parse_hosts(part)))
    except ValueError as error:
        raise ValueError(f"cluster {text!r}: {error}. Write {SPEC_FORMS}.") from None


def parse_link(text: str) -> LinkSpec:
    """Read a rate and perhaps a delay, such as ``100mbit+50ms``; raises a ValueError for anything else."""
    rate, plus, delay = text.partition("+")
    delay_s = _with_unit(delay, _UNITS_S) if plus else 0.0
    if delay_s is None:
        raise ValueError(f"a delay must be {DELAY_FORMS}; got {delay!r}")
    return LinkSpec(parse_rate(rate), delay_s)


def parse_rate(text: str) -> int | None:
    """Read a rate, one of ``RATE_FORMS``: bits per second, or None for no limit; raises a ValueError for any other."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    rate_bits_per_s = round(_with_unit(word, _UNITS_BITS_PER_S) or 0)
    if rate_bits_per_s < 1:
        raise ValueError(f"a rate must be {RATE_FORMS}; got {text!r}")
    return rate_bits_per_s


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
        raise ValueError(f"a number of hosts must be an integer from 1 to {MOST_HOSTS}; got {text!r}")
    return int(text)
