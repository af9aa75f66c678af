"""The versions that are tested: what `make` installs, and both ends of the range in pyproject.toml."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENDS = ("constraints-oldest.txt", "constraints-newest.txt")


def versions(name: str) -> dict[str, tuple[int, ...]]:
    """Each package of a constraints file and its version."""
    lines = re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {package: tuple(map(int, number.split("."))) for package, number in lines}


def least() -> dict[str, tuple[int, ...]]:
    """The oldest version of each package that pyproject.toml allows to users."""
    found = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    return {package: tuple(map(int, number.split("."))) for package, number in reversed(found)}


def test_the_oldest_versions_tested_are_the_oldest_allowed() -> None:
    tested, allowed = versions("constraints-oldest.txt"), least()
    for package in ("torch", "lightning", "torchmetrics", "rich", "jsonargparse"):
        assert tested[package][: len(allowed[package])] == allowed[package], package


def test_what_make_installs_lies_between_the_ends() -> None:
    oldest, newest = (versions(name) for name in ENDS)
    for package, version in versions("constraints.txt").items():
        if package in oldest:
            assert oldest[package] <= version <= newest[package], package


@pytest.mark.parametrize("name", ENDS)
def test_the_workflow_tests_each_end(name: str) -> None:
    assert name in (ROOT / ".github/workflows/ci.yml").read_text()
