"""The code in the pages runs, their links lead somewhere, the errors they quote exist, and the site builds."""

import ast
import doctest
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_sparse as ls
from lightning_sparse.bench.cluster import Cluster
from tests.support.processes import Ranks, print_to

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "lightning_sparse"
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    if not page.is_relative_to(DOCS / "_build")  # copies, where links lead elsewhere
)
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if re.search(r"^\s*>>> ", file.read_text(), re.MULTILINE)
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@every_page
def test_python_blocks_run(page: Path) -> None:
    """In order, in one namespace; a Trainer is built but trains nothing."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        here = "devices=1" if "accelerator=" in block else "devices=1, accelerator='cpu'"
        code = re.sub(r"devices=\d+", here, block)
        code = re.sub(r"num_nodes=\d+", "num_nodes=1", code)
        exec(compile("import lightning as L\n" + code, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "pycon")], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_sessions_give_what_they_show(page: Path) -> None:
    session = "\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, page.name, str(page), 0)
    assert not doctest.DocTestRunner().run(test).failed


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    assert not doctest.testmod(importlib.import_module(module)).failed


@every_page
def test_shell_scripts_are_scripts(page: Path) -> None:
    for script in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@every_page
def test_configurations_are_yaml(page: Path) -> None:
    for text in blocks(page, "yaml"):
        assert all(isinstance(each, dict) for each in yaml.safe_load_all(text))


@every_page
def test_no_line_is_taken_for_a_comment(page: Path) -> None:
    assert not re.findall(r"^\s*%.*", page.read_text(), re.MULTILINE)


@every_page
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@every_page
def test_tests_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"\[(test_\w+)\]\(([^)#]+\.py)\)", text)
    titled = [(name, file) for file, name in re.findall(r"\[test\]\((\S+\.py) \"(test_\w+)", text)]
    for name, file in named + titled:
        assert f"def {name}(" in (page.parent / file).read_text(), name


def test_every_public_name_is_in_the_api() -> None:
    page = (DOCS / "api.md").read_text() + (DOCS / "internals.md").read_text()
    for name in ls.__all__:
        assert name == "__version__" or re.search(rf"^\.\. [\w:]+:: {name}$", page, re.MULTILINE), name


def test_errors_that_pages_quote_exist() -> None:
    """Every text in the first column of the tables of what lightning_sparse says; … stands for anything."""
    page = (DOCS / "troubleshooting.md").read_text()
    ours = page[page.index("## What lightning_sparse says") : page.index("## What Lightning and PyTorch say")]
    quoted = re.findall(r"^\| `([^`]+)`", ours, re.MULTILINE)
    assert len(quoted) > 15
    files = [*ROOT.glob("lightning_sparse/**/*.py"), ROOT / "lightning_sparse_cli.py"]
    texts = [text for file in files for text in _texts(ast.parse(file.read_text()))]
    for quote in quoted:
        pattern = ".*".join(re.escape(part) for part in quote.split("…"))
        assert any(re.search(pattern, text) for text in texts), quote


def _texts(tree: ast.AST) -> list[str]:
    """Every text in a module, with … where a value goes in."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def train_as_shown(rank: int, size: int, folder: Path) -> None:
    print_to(folder / f"rank{rank}.txt")
    os.chdir(folder)
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


@pytest.mark.programs
def test_the_script_of_the_five_minutes_trains(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks(DOCS / "start.md", "python")[0])
    ranks.run(train_as_shown, 2, tmp_path)
    assert "averages 301,066 elements among 2 ranks" in (tmp_path / "rank0.txt").read_text()
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.programs
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_recipe_for_two_hosts_trains(tmp_path: Path) -> None:
    """On network namespaces, in the place of containers; the recipe limits their links itself."""
    (recipe,) = [block for block in blocks(DOCS / "multi-node.md", "bash") if "tc qdisc" in block]
    (tmp_path / "host.sh").write_text(recipe)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Cluster("2xunlimited") as cluster:
        settings = [f"FIRST_HOST={cluster.address(0)}", "RATE=1gbit", f"PATH={path}"]
        script = f"cd {tmp_path} && bash host.sh"
        hosts = [["env", f"NODE_RANK={rank}", *settings, "bash", "-c", script] for rank in range(2)]
        ended = cluster.run(hosts, timeout_s=250)
    assert "sparse_dense" in ended[0].stdout


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q"]
    built = subprocess.run([*command, str(DOCS), str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()
