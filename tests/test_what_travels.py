"""The tables of docs/what-travels.md are what its script counts."""

import runpy
from pathlib import Path

import pytest

import lightning_sparse as ls
from lightning_sparse.wire import FLOAT32, INT4, WIRE_DTYPES

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "figures" / "what_travels.py"))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "what-travels.md").read_text().partition(SCRIPT["START"])[2].splitlines()
    if line.startswith("| `")
]  # bytes among 4 ranks, bytes among 16, messages among 4, messages among 16


@pytest.mark.parametrize("name", ["sparse_dense", "micro", "importance", "low_rank"])
def test_the_page_has_what_is_counted(name: str) -> None:
    of_four, of_sixteen, exact, rounded, *among_sixteen = [row for row in ROWS if row[0] == f"`{name}`"]
    assert len(of_four) == len(of_sixteen) == 1 + len(WIRE_DTYPES)
    compressor = ls.COMPRESSORS[name]()
    found = SCRIPT["count"](compressor, 4, INT4)
    assert of_four[1 + list(WIRE_DTYPES).index("int4")] == found.bytes_each
    assert rounded == [f"`{name}`", "int4", *found.numbers, str(SCRIPT["roundings"](compressor, 4))]
    assert [row[1::4] for row in (exact, among_sixteen[0])] == [["float32", "0"]] * 2


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
        _, _, _, rounded, *_ = [row for row in ROWS if row[0] == f"`{name}`"]
        assert rounded[-1] == expected
