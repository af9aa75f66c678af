"""Who may import what, and how long things may get: the structure, held by a test."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_sparse"
FILES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))
CORE = [f for f in FILES if not f.startswith("bench/") and f != "cli.py"]

MAY_IMPORT_LIGHTNING = {
    "strategy.py",
    "pytorch_lightning.py",
    "registry.py",
    "callbacks.py",
    "replicas.py",
    "fabric.py",
}
MAY_IMPORT_DISTRIBUTED = {
    "comm.py",
    "delivery.py",
    "exchange.py",
    "checkpoint.py",
    "strategy.py",
    "hook.py",
    "options.py",
    "process_groups.py",
}
# Each file and which of ours it may import: a layer sees only the layers before it.
LAYERS = [
    {"__about__", "streams", "sparse", "wire", "control", "partition", "metrics", "settings"},
    {"select", "sketch", "plan"},
    {"kernels"},
    {"comm", "group"},
    {"agreement"},
    {"ring", "sparse_collectives", "lane", "timeline", "delivery", "loss_scale", "used", "process_groups", "sample"},
    {"report"},
    {"compressors"},
    {"fusion", "exchange", "simulation"},
    {"planner", "record"},
    {"rehearsal"},
    {"layer_fusion"},
    {"checkpoint", "plan_views"},
    {"damage"},
    {"hook", "pictures", "replicas"},
    {"callbacks"},
    {"options"},
    {"strategy", "fabric"},
    {"pytorch_lightning"},
    {"registry"},
    {"__init__"},
]


def imports(file: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_the_door_to_the_network_is_narrow() -> None:
    users = {f for f in CORE if any(n.startswith("torch.distributed") for n in imports(f))}
    assert users <= MAY_IMPORT_DISTRIBUTED


def test_few_files_know_lightning() -> None:
    users = {f for f in CORE if any(n.split(".")[0] in {"lightning", "pytorch_lightning"} for n in imports(f))}
    assert users <= MAY_IMPORT_LIGHTNING


@pytest.mark.parametrize("file", CORE)
def test_a_file_imports_only_layers_below_its_own(file: str) -> None:
    own = file.removesuffix(".py").split("/")[0]
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "lightning_sparse" and len(parts) > 1 and any(parts[1] in names for names in LAYERS):
            assert parts[1] == own or layer(parts[1]) < layer(own), f"{file} imports {name}"


@pytest.mark.parametrize("file", CORE)
def test_files_and_functions_stay_short(file: str) -> None:
    text = (PACKAGE / file).read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
