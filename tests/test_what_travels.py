"""The table of docs/how-it-works.md is what its script counts."""

import runpy
from pathlib import Path

import pytest

import lightning_sparse as ls
from lightning_sparse.wire import FLOAT32, INT4

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "figures" / "what_travels.py"))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "how-it-works.md").read_text().partition(SCRIPT["START"])[2].splitlines()
    if line.startswith("| `")
]  # the name; bytes in float32 and int4, among 4 ranks and among 16; rounds, hops and roundings in int4 among 4


@pytest.mark.parametrize("name", ["sparse_dense", "micro", "importance", "low_rank"])
def test_the_page_has_what_is_counted(name: str) -> None:
    (shown,) = [row for row in ROWS if row[0] == f"`{name}`"]
    compressor = ls.COMPRESSORS[name]()
    columns = [(ranks, wire_dtype) for ranks in (4, 16) for wire_dtype in (FLOAT32, INT4)]
    found = [SCRIPT["count"](compressor, ranks, wire_dtype) for ranks, wire_dtype in columns]
    assert shown[1:5] == [each.bytes_each for each in found]
    assert shown[5:] == [*found[1].numbers[1:], str(SCRIPT["roundings"](compressor, 4))]


def test_rounds_and_hops_by_hand() -> None:
    for ranks in (4, 8):
        backend = SCRIPT["count"](ls.Dense(), ranks, FLOAT32, n=4096, hop_bytes=0)
        two_hops = SCRIPT["count"](ls.Dense(), ranks, INT4, n=128**2, hop_bytes=1)
        one_hop = SCRIPT["count"](ls.Dense(), ranks, INT4, n=256, hop_bytes=2**20)
        assert [each.numbers for each in (backend, two_hops, one_hop)] == [
            ["1", "1", str(2 * (ranks - 1))],
            ["2", "2", "2"],
            ["1", "1", "1"],
        ]


def test_roundings_by_hand() -> None:
    assert SCRIPT["roundings"](ls.RandomK(density=0.001), 4) == 1
    for name, expected in (
        ("sparse_dense", "2"),
        ("sparse_topk", "1"),
    ):  # as they are counted, of which there is a test above
        (shown,) = [row for row in ROWS if row[0] == f"`{name}`"]
        assert shown[-1] == expected
