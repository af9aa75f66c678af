"""The command line's help and list are there at once, and say what the classes say."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sparse.bench.compare.workloads import WORKLOADS
from lightning_sparse.cli import main, names
from lightning_sparse.compressors import NAMES

COMMANDS = ["advise", "bench", "doctor", "scale", "simulate"]
START = """import sys
sys.argv[0] = "/bin/lightning-sparse"
from lightning_sparse.cli import command
sys.exit(command())"""
HEAVY = "torch", "lightning", "numpy", "matplotlib"


@pytest.mark.parametrize("words", [["--help"], ["list"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_and_list_import_nothing_heavy(words: list[str]) -> None:
    program = f"""import atexit, sys
atexit.register(lambda: print("imported:", [name for name in {HEAVY} if name in sys.modules]))
{START}"""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("imported: []\n")


def test_a_command_runs_with_all_of_the_package(tmp_path: Path) -> None:
    bench = [sys.executable, "-c", START, "bench", "--strategies", "ddp,topk", "--output", str(tmp_path)]
    done = subprocess.run(bench, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Did you mean 'sparse_topk'?" in done.stderr


def test_names_are_those_of_the_classes() -> None:
    assert {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in NAMES.items()} == names.STRATEGIES
    assert tuple(WORKLOADS) == names.WORKLOADS


def test_list_prints_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
