"""Who may import what, and how long things may get: the structure, held by a test."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_sparse"
FILES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))
CORE = [f for f in FILES if not f.startswith(("bench/", "cli/"))]

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
    {"checkpoint"},
    {"fusion"},
    {"auto"},
    {"monitor"},
    {"doors", "trainer"},
    {"bench", "cli"},
]
DOORS = next(i for i, names in enumerate(LAYERS) if "doors" in names)
MAY_IMPORT_LIGHTNING = {
    "trainer/",
    "pytorch_lightning.py",
    "registry.py",
    "fabric.py",
    "monitor/",
}
MAY_IMPORT_DISTRIBUTED = {
    "network/",
    "engine/step.py",
    "engine/exchange.py",
    "engine/gradients.py",
    "engine/local_exchange.py",
    "engine/build.py",
    "engine/shard_groups.py",
    "engine/sharded_model.py",
    "checkpoint/sharded.py",
    "auto/switch.py",
    "fabric.py",
    "hook.py",
    "options.py",
    "trainer/hsdp.py",
    "trainer/signals.py",
}


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


def users(package: str) -> set[str]:
    return {f for f in CORE if any(n == package or n.startswith(f"{package}.") for n in imports(f))}


def test_the_door_to_the_network_is_narrow() -> None:
    assert not {f for f in users("torch.distributed") if not f.startswith(tuple(MAY_IMPORT_DISTRIBUTED))}


def test_few_files_know_lightning() -> None:
    found = users("lightning") | users("pytorch_lightning")
    assert not {f for f in found if not f.startswith(tuple(MAY_IMPORT_LIGHTNING))}


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_layers_below_its_own(file: str) -> None:
    own = file.removesuffix(".py").split("/")[0]
    for name in imports(file):
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if package == "lightning_sparse" and (PACKAGE / other).exists() | (PACKAGE / f"{other}.py").exists() and rest:
            assert other == own or layer(other) < layer(own) or layer(other) == layer(own) >= DOORS, name


def test_an_engine_is_asked_by_methods() -> None:
    """Nobody asks which of the two it is, and nobody sets an attribute of it from outside."""
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                assert not re.search("(Local|Gradient)Averager", ast.unparse(node.args[1])), (file, node.lineno)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assert not re.search(r"exchange\.\w+$", ast.unparse(target)), (file, node.lineno)


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_stay_short(file: str) -> None:
    text = (PACKAGE / file).read_text()
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
