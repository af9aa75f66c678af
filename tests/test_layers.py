"""Who may import what, and how long things may get: the structure, held by a test."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_sparse"
FILES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))

# Folders, bottom up: a folder imports only itself and those before it.  The files beside them are the doors, which
# users import, and stand beside the Trainer's strategies, which some of them are; the bench and its command line stand
# on top.
LAYERS = [
    {"settings", "__about__"},
    {"kernels"},
    {"wire"},
    {"checks"},
    {"selection"},
    {"network"},
    {"compressors"},
    {"engine"},
    {"gradients", "local_steps"},
    {"sharded", "elastic"},
    {"checkpoint"},
    {"fusion"},
    {"auto"},
    {"monitor"},
    {"doors", "trainer"},
    {"bench", "cli"},
]
DOORS = next(i for i, names in enumerate(LAYERS) if "doors" in names)


def imports(file: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def layer(name: str) -> int:
    """Of a file or a module: its folder's, or the doors'."""
    return next((i for i, names in enumerate(LAYERS) if name in names), DOORS)


@pytest.mark.parametrize("file", FILES)
def test_what_is_below_the_network_knows_no_process_groups_and_what_is_below_the_doors_no_lightning(file: str) -> None:
    own = layer(file.removesuffix(".py").split("/")[0])
    packages = {name.partition(".")[0] for name in imports(file)}
    if own < layer("network"):
        assert not any(name.startswith("torch.distributed") for name in imports(file))
    if own < layer("monitor"):
        assert not packages & {"lightning", "pytorch_lightning"}


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_layers_below_its_own(file: str) -> None:
    own = file.removesuffix(".py").split("/")[0]
    for name in imports(file):
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if package == "lightning_sparse" and (PACKAGE / other).exists() | (PACKAGE / f"{other}.py").exists() and rest:
            assert other == own or layer(other) < layer(own) or layer(other) == layer(own) >= DOORS, name


def test_nobody_sets_an_attribute_of_an_averager_from_outside() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assert not re.search(r"(exchange|averager)\.\w+$", ast.unparse(target)), (file, node.lineno)


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_stay_short(file: str) -> None:
    text = (PACKAGE / file).read_text()
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
