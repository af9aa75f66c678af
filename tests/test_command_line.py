"""The command line's help and list are there at once, and say what the classes say."""

import pkgutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import lightning_sparse_cli as options
from lightning_sparse.__about__ import __version__
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.compare.workloads import WORKLOADS

COMMANDS = ["advise", "bench", "doctor", "scale"]
START = """import sys
from lightning_sparse_cli import command
sys.exit(command())"""
HEAVY = "torch", "lightning", "numpy", "matplotlib"


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], ["list"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_and_list_import_nothing_heavy(words: list[str]) -> None:
    program = f"""import atexit, sys
atexit.register(lambda: print("imported:", [name for name in {HEAVY} if name in sys.modules]))
{START}"""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("imported: []\n")
    assert words != ["list"] or "ddp_micro" in done.stdout


def test_a_command_runs_with_all_of_the_package(tmp_path: Path) -> None:
    bench = [sys.executable, "-c", START, "bench", "--strategies", "ddp,topk", "--output", str(tmp_path)]
    done = subprocess.run(bench, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Did you mean 'sparse_topk'?" in done.stderr


def test_names_are_those_of_the_classes() -> None:
    listed = {name: line for group in options.STRATEGIES.values() for name, line in group.items()}
    assert {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in NAMES.items()} == listed
    assert tuple(WORKLOADS) == options.WORKLOADS


def test_the_list_says_first_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.main(["list"]) == 0
    said = capsys.readouterr().out
    places = [
        said.index(each) for each in ("start here", "sparse_auto", "methods", "micro", "baselines", "sparse_topk")
    ]
    assert places == sorted(places)


def test_without_a_command_the_help_and_on_demand_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        options.main(["--help"])
    assert without == capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        options.main(["--version"])
    assert capsys.readouterr().out == f"lightning-sparse {__version__}\n"


KINDS = [options.Advise, options.Bench, options.Doctor, options.Scale]


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_is_an_option_and_each_command_has_its_function(kind: type[options.Command]) -> None:
    name = kind.__name__.lower()
    given = vars(options.parser().parse_args([name, *(["mlp_1m"] if kind is options.Advise else [])]))
    assert given.pop("name") == name
    made = given.pop("options")(**given, command="typed")
    assert type(made) is kind
    assert given.keys() == {each.name for each in fields(kind)} - {"command"}
    assert callable(pkgutil.resolve_name(made.runs))
