"""One word for each thing, the field's where there is one: words that were ours alone stay away."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("lightning_sparse/**/*.py", "tests/**/*.py", "examples/**/*.py", "docs/*.md", "docs/figures/*.py", "*.md")
FILES = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern) if path != Path(__file__))
INSTEAD = {
    r"owe[sd]?|owing|debt": "unsent, what a rank has not sent",
    r"faithful\w*": "compression error",
    r"rehears\w*": "measure",
    r"delivery|deliveries": "bucket, pending bucket",
    r"holders?": "namespaces",
}
STORED = re.compile(r"\d{4}-\d\d-\d\d[\w-]*|figures/faithfulness\.py")  # names of stored measurements


@pytest.mark.parametrize("word", INSTEAD)
def test_there_is_one_word_for_each_thing(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(rf"\b({word})\b", STORED.sub("", line), re.IGNORECASE)
    ]
    assert not found, f"say {INSTEAD[word]!r} in place of {word!r}"


def test_a_class_has_its_name_to_itself() -> None:
    doors = ["SparseDDPStrategy", "SparseHSDPStrategy"]  # one of each Lightning package, and of Fabric
    trees = [ast.parse(path.read_text()) for path in (ROOT / "lightning_sparse").rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert sorted(name for name, times in names.items() if times > 1) == doors
