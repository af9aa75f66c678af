"""Which rooms of the bench may import which, and that no two files of it import each other."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_sparse"
FILES = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts): f for f in (PACKAGE / "bench").rglob("*.py")}
ROOMS = [{"cluster", "delay", "output"}, {"compare"}, {"advise", "doctor", "scale"}]  # bottom up


def imports(file: Path) -> set[str]:
    """The files of the bench that one imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & FILES.keys()


def test_files_import_without_cycles() -> None:
    graph = {name: imports(file) for name, file in FILES.items()}
    assert sum(map(len, graph.values())) > 25
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the files


def test_rooms_import_those_below_them() -> None:
    floor = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
    for name, file in FILES.items():
        own = name.split(".")[2:]
        for other in (each.split(".")[2:] for each in imports(file)):
            if own and other and own[0] != other[0] and own[0] != "__init__":
                assert floor[other[0]] < floor[own[0]], f"{name} imports {'.'.join(other)}"
