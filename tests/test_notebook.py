"""The notebook is stored with its outputs, and runs in a real Jupyter kernel."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare_compressors.ipynb"
CELL_S = 150  # that a cell may take; the whole takes 15 on two idle cores


@pytest.fixture
def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    return "".join(output.get("text", "") for cell in code(notebook) for output in cell.outputs)


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for cell in code(notebook) for output in cell.outputs)


def accuracies(notebook: Any) -> dict[str, float]:
    found = re.findall(r"^(\w+)_notebook +test accuracy (.*)%$", printed(notebook), re.MULTILINE)
    return {name: float(percent) for name, percent in found}


def test_it_is_stored_as_it_was_run(stored: Any) -> None:
    assert [cell.execution_count for cell in code(stored)] == [*range(1, len(code(stored)) + 1)]
    kinds = {output.output_type for cell in code(stored) for output in cell.outputs}
    assert kinds == {"stream", "display_data", "execute_result"}  # and no error
    assert pictures(stored) == 3
    assert NOTEBOOK.stat().st_size < 300_000
    assert not re.search(r"site-packages|/tmp/|/home/|/root/", NOTEBOOK.read_text())


@pytest.mark.programs
@pytest.mark.timeout(3 * CELL_S)
def test_it_runs(stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # nobody's own settings, and no traces
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures go into the notebook
    fresh = deepcopy(stored)
    for cell in code(fresh):
        cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(fresh, timeout=CELL_S, kernel_name="python3", resources=where).execute()

    assert pictures(fresh) == pictures(stored)
    assert accuracies(fresh).keys() == accuracies(stored).keys() == {"sparse_dense", "skip_reduce", "micro"}
    assert min(accuracies(fresh).values()) > 80
    shares = dict(re.findall(r"^(\w+)(?: \d %)? +[\d,]+ +([\d.]+)%", printed(fresh), re.MULTILINE))
    assert shares["skip_reduce"] == "66.7"  # 4 of 6 slices on four ranks
    assert float(shares["micro"]) < float(shares["sketch_fusion"]) < 25
