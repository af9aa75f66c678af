"""What clusters there can be, as text."""

import pytest

from lightning_sparse.bench.cluster import ClusterSpec, LinkSpec, parse, parse_rate

GBIT, MBIT = 10**9, 10**6


@pytest.mark.parametrize(
    ("text", "rate_bits_per_s"),
    [
        ("100mbit", 100 * MBIT),
        ("1gbit", GBIT),
        ("2.5gbit", 2_500_000_000),
        ("64kbit", 64_000),
        ("9600bit", 9600),
        (" 1GBit ", GBIT),
        ("unlimited", None),
    ],
)
def test_parse_rate(text: str, rate_bits_per_s: int | None) -> None:
    assert parse_rate(text) == rate_bits_per_s


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "0mbit", "0.1bit", "1e3mbit", "1gbit/s", "nan"])
def test_bad_rate_is_named_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"a rate must be a number and a unit, such as '100mbit'") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


def test_parse_flat() -> None:
    assert parse("4x1gbit") == parse("4x1x1gbit") == ClusterSpec((LinkSpec(GBIT),) * 4, (1,) * 4)
    assert parse("2xunlimited") == ClusterSpec((LinkSpec(),) * 2, (1, 1))


def test_parse_hosts_of_different_rates() -> None:
    spec = parse("3x1gbit+1x100mbit")
    assert spec.hosts == 4
    assert [link.rate_bits_per_s for link in spec.links] == [GBIT, GBIT, GBIT, 100 * MBIT]


def test_ranks_of_a_host_follow_one_another() -> None:
    spec = parse("1x2x100mbit+50ms+2xunlimited+1x3x1gbit")
    assert (spec.hosts, spec.ranks, spec.local_sizes) == (4, 7, (2, 1, 1, 3))
    assert spec.places == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]
    assert spec.links == (LinkSpec(100 * MBIT, 0.05), LinkSpec(), LinkSpec(), LinkSpec(GBIT))
    assert parse("1x999x1gbit").ranks == 999


def test_a_delay_is_one_way_between_hosts_that_have_it() -> None:
    spec = parse("3x100mbit+50ms")
    assert spec == ClusterSpec((LinkSpec(100 * MBIT, 0.05),) * 3, (1,) * 3)
    assert spec.delay_s(0, 1) == spec.delay_s(2, 0) == spec.longest_delay_s == 0.05
    assert spec.hop_s == pytest.approx(0.0502)


def test_half_of_a_delay_is_at_each_end() -> None:
    spec = parse("1x1gbit+5ms+2x100mbit+0.1s+1xunlimited")
    assert [spec.delay_s(0, target) for target in range(1, 4)] == pytest.approx([0.0525, 0.0525, 0.0025])
    assert spec.longest_delay_s == spec.delay_s(1, 2) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("1gbit", "'1gbit'"),
        ("x1gbit", "''"),
        ("0x1gbit", "'0'"),
        ("4x", "''"),
        ("4xfast", "'fast'"),
        ("4x1gbit+", "''"),
        ("4x1gbit+50", "'50'"),
        ("4x1gbit+fast", "'fast'"),
        ("3x1gbit+100mbit", "'100mbit'"),
        ("4x1gbit+5ms+5ms", "'5ms+5ms'"),
        ("2x2x2x10gbit", "'2x10gbit'"),
        ("2xx1gbit", "''"),
        ("2x0x1gbit", "'0'"),
        ("2x1.5x1gbit", "'1.5'"),
        ("2x1000x1gbit", "'1000'"),
        ("2x2x", "''"),
        ("2x2x1gbit+2ranksx1gbit", "'2ranks'"),
        ("4x10gbit/1gbit", "'10gbit/1gbit'"),
        ("255x1gbit", "'255'"),
        ("200x1gbit+55x1gbit", "255"),
        ("9999x1gbit", "'9999'"),
    ],
)
def test_bad_spec_is_named_with_the_allowed_forms(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=r"'4x1gbit'.*'2x4x1gbit'.*'3x1gbit") as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"cluster {text!r}: ")
    assert f"got {part}. Write" in message


@pytest.mark.parametrize(("text", "s_per_byte"), [("3x1gbit+1x100mbit", 8e-8), ("2xunlimited", 0)])
def test_the_slowest_link_says_how_long_a_byte_takes(text: str, s_per_byte: float) -> None:
    assert parse(text).s_per_byte == pytest.approx(s_per_byte)
