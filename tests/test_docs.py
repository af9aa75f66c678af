"""The code in the pages runs as written, and their links lead somewhere."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_blocks_run(page: Path) -> None:
    """In order, in one namespace; a Trainer is built but trains nothing."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        code = block.replace("devices=4", "devices=1").replace("devices=2,", "devices=1, accelerator='cpu',")
        code = code.replace("num_nodes=4", "num_nodes=1")
        exec(compile("import lightning as L\n" + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_that_pages_name_exist(page: Path) -> None:
    for name, file in re.findall(r"\[(test_\w+)\]\(([^)#]+\.py)\)", page.read_text()):
        assert f"def {name}(" in (page.parent / file).read_text(), name


@pytest.mark.parametrize("module", ["metrics", "simulation"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_sparse.{module}"))
    assert result.attempted
    assert not result.failed
