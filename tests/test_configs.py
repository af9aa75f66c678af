"""Config files: what a LightningCLI and Hydra make of them, what they reach, and what is said where they are wrong."""

import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml

import lightning_sparse as ls
from tests.support.models import weights
from tests.support.processes import Ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = EXAMPLES / "configs"
SYSTEMS = ("skip_reduce", "micro", "importance", "sketch_fusion", "ok_topk")
STRATEGY = "--trainer.strategy"
Configure = Callable[..., Any]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    """What ``python examples/cli.py fit ARGUMENTS`` would train with: its strategy."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def strategy(*arguments: str) -> Any:
        from digits import Digits, DigitsClassifier
        from lightning.pytorch.cli import LightningCLI

        monkeypatch.setattr(sys, "argv", ["cli.py", *arguments])
        return LightningCLI(DigitsClassifier, Digits, run=False, seed_everything_default=False).trainer.strategy

    return strategy


def config(name: str) -> Any:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def written(content: Any, folder: Path) -> str:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


# - the files


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_config_shows_every_option_of_its_system_at_its_default(configure: Configure, name: str) -> None:
    shown = config(name)["trainer"]["strategy"]["init_args"]["compressor"]["init_args"]
    assert list(shown) == [field.name for field in fields(ls.COMPRESSORS[name])]  # type: ignore[arg-type]
    strategy = configure(f"--config={CONFIGS / name}.yaml")
    assert strategy.compressor == ls.COMPRESSORS[name]()
    assert strategy.options.wire_dtype == ("bfloat16" if name == "skip_reduce" else "int4")


def commands() -> list[str]:
    """Of the LightningCLI, in the heads of all files."""
    files = [EXAMPLES / "cli.py", *CONFIGS.glob("*.yaml")]
    heads = [file.read_text() for file in files]
    return [c for head in heads for c in re.findall(r"^[# ]+python examples/cli.py fit (.*)$", head, re.MULTILINE)]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_the_commands_in_the_files_are_understood(
    configure: Configure, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    if "--print_config" in command:
        with pytest.raises(SystemExit, match="0"):
            configure(*shlex.split(command))
        assert "class_path: lightning_sparse.MiCRO" in capsys.readouterr().out
    else:
        assert isinstance(configure(*shlex.split(command)), ls.SparseDDPStrategy)


def test_a_strategy_for_sharded_models_is_a_class_or_a_name(configure: Configure, tmp_path: Path) -> None:
    content = config("micro")
    local = {"class_path": "lightning_sparse.LocalSteps", "init_args": {"steps": 4}}
    settings = {"compressor": "sparse_dense", "wire_dtype": "int4", "replicate_size": 2, "local_steps": local}
    content["trainer"]["strategy"] = {"class_path": "lightning_sparse.SparseHSDPStrategy", "init_args": settings}
    by_class, by_name = configure(f"--config={written(content, tmp_path)}"), configure(f"{STRATEGY}=sparse_dense_hsdp")
    assert isinstance(by_class, ls.SparseHSDPStrategy)
    assert isinstance(by_name, ls.SparseHSDPStrategy)
    assert by_class.options.wire_dtype == "int4"
    assert by_class.options.local == ls.LocalSteps(4)
    assert by_class.compressor == by_name.compressor == ls.Dense()


def test_what_was_saved_of_a_run_with_sparse_auto_runs_again(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = config("micro")
    compressor = {"class_path": "lightning_sparse.Auto", "init_args": {"at_most": 0.02}}
    content["trainer"]["strategy"]["init_args"] = {"compressor": compressor}
    with pytest.raises(SystemExit, match="0"):
        configure(f"--config={written(content, tmp_path)}", "--print_config")
    said = capsys.readouterr()
    assert "Unable to serialize" not in said.out + said.err
    (tmp_path / "saved.yaml").write_text(said.out)
    assert configure(f"--config={tmp_path / 'saved.yaml'}").compressor == ls.Auto(at_most=0.02)


# - one line


def train(rank: int, size: int, folder: str, runs: list[list[str]]) -> list[Any]:
    """Three steps of ``examples/cli.py`` with each of the arguments."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    from cli import main

    results = []
    for i, arguments in enumerate(runs):
        few = ["max_steps=3", "limit_val_batches=1", "num_sanity_val_steps=0", f"default_root_dir=run{i}"]
        quiet = [f"{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
        sys.argv = ["cli.py", "fit", *arguments, *(f"--trainer.{option}" for option in few + quiet)]
        cli = main()
        last = cli.trainer.strategy.averager.last  # type: ignore[attr-defined]
        results.append((cli.trainer.strategy.compressor, last.sent_bytes / last.dense_bytes, weights(cli.model)))  # type: ignore[attr-defined]
    return results


def instantiated(node: Any) -> Any:
    """What ``hydra.utils.instantiate`` makes of plain lists and dictionaries."""
    if isinstance(node, list):
        return [instantiated(value) for value in node]
    if not isinstance(node, dict):
        return node
    values = {key: instantiated(value) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return values
    module, _, name = node["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**values)


def train_hydra(rank: int, size: int, folder: str) -> list[str]:
    """Three steps of what ``hydra.yaml`` describes; the keys that its monitor logged."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    described = config("hydra")
    described["trainer"] |= {"max_steps": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0, "logger": False}
    described["trainer"] |= {"enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1}
    trainer, model, data = (instantiated(described[part]) for part in ("trainer", "model", "data"))
    trainer.fit(model, data)
    return sorted(trainer.callback_metrics)


def test_what_the_hydra_config_describes_trains(ranks: Ranks, tmp_path: Path) -> None:
    for keys in ranks.run(train_hydra, 2, str(tmp_path)):
        assert {"sparse/compression_ratio", "sparse/density"} <= set(keys)


@pytest.mark.programs
def test_one_line_switches_all_five_systems(ranks: Ranks, tmp_path: Path) -> None:
    """The name in ``by_name.yaml``, and the name of the config file; three steps of each on two processes."""
    before = (CONFIGS / "by_name.yaml").read_text()
    runs = []
    for name in SYSTEMS:
        after = re.sub(r"strategy: \w+", f"strategy: {name}", before)
        changed = [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
        assert len(changed) == 1
        file = tmp_path / f"{name}.yaml"
        file.write_text(after)
        runs.append([f"--config={file}"])
    runs.append([f"--config={CONFIGS / 'micro.yaml'}", f"{STRATEGY}.warmup_steps=1"])
    results = ranks.run(train, 2, str(tmp_path), runs)
    for i, (name, (compressor, sent, trained)) in enumerate(zip([*SYSTEMS, "micro"], results[0], strict=True)):
        assert compressor == ls.COMPRESSORS[name]()
        assert sent <= (0.5 if name == "skip_reduce" else 0.25), name  # of what plain DDP sends
        assert trained.equal(results[1][i][2]), name


# - every option


def other(name: str, kind: Any, default: Any) -> Any:
    """A value of an option that is not its default, and allowed."""
    if get_origin(kind) is not None and get_origin(kind) is not tuple:  # a Literal
        return next(value for value in get_args(kind) if value != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 2
    if isinstance(default, float):
        return 1.5 * default or 0.5
    if isinstance(default, tuple):
        return [*default, "*.bias"]
    assert name == "indices", f"what is allowed for {name}?"
    return "int32"


OPTIONS: dict[str, tuple[str, Any]] = {  # as written, and as they arrive
    "fusion": ("['model.0.*', '*']", ("model.0.*", "*")),
    "wire_dtype": ("int8", "int8"),
    "warmup_steps": ("7", 7),
    "residuals": ("mean", "mean"),
    "find_unused_parameters": ("true", True),
    "gradient_as_bucket_view": ("true", True),
    "static_graph": ("true", True),
    "broadcast_buffers": ("false", False),
    "bucket_cap_mb": ("4", 4),
    "timeout": ("0:02:00", timedelta(minutes=2)),
    "process_group_backend": ("gloo", "gloo"),
    "start_method": ("spawn", "spawn"),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_option_of_a_system_is_reached(configure: Configure, tmp_path: Path, name: str) -> None:
    """In a file, and on the command line."""
    kind = ls.COMPRESSORS[name]
    hints = get_type_hints(kind)
    settings = {f.name: other(f.name, hints[f.name], f.default) for f in fields(kind)}  # type: ignore[arg-type]
    content = config(name)
    content["trainer"]["strategy"]["init_args"]["compressor"]["init_args"] = settings
    typed = [f"{STRATEGY}.compressor.{key}={value}" for key, value in settings.items()]
    for given in ([f"--config={written(content, tmp_path)}"], [f"--config={CONFIGS / name}.yaml", *typed]):
        assert configure(*given).compressor == kind(**settings)
    assert all(value != field.default for value, field in zip(settings.values(), fields(kind), strict=True))  # type: ignore[arg-type]


def test_every_option_of_the_strategy_is_reached(configure: Configure, tmp_path: Path) -> None:
    content = config("micro")
    options = {name: yaml.safe_load(text) if name != "timeout" else text for name, (text, _) in OPTIONS.items()}
    content["trainer"]["strategy"]["init_args"] = options | {"compressor": "ok_topk"}
    typed = [f"{STRATEGY}.{name}={text}" for name, (text, _) in OPTIONS.items()]
    for given in (
        [f"--config={written(content, tmp_path)}"],
        ["--trainer.accelerator=cpu", f"{STRATEGY}=SparseDDPStrategy", f"{STRATEGY}.compressor=ok_topk", *typed],
    ):
        strategy = configure(*given)
        own = vars(strategy.options) | vars(strategy) | strategy._ddp_kwargs
        arrived = {name: own.get(name, own.get(f"_{name}")) for name in OPTIONS}
        assert arrived == {name: value for name, (_, value) in OPTIONS.items()}


# - what is wrong


def said_of(configure: Configure, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        configure(*arguments)
    return capsys.readouterr().err


def test_a_key_that_nothing_takes_is_named(
    configure: Configure, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By jsonargparse, in the middle of a long error: we are not asked before."""
    content = config("micro")
    content["trainer"]["strategy"]["init_args"]["compressor"]["init_args"] = {"densty": 0.05}
    said = said_of(configure, capsys, f"--config={written(content, tmp_path)}")
    assert re.search("Problem with given class_path 'lightning_sparse.MiCRO':\\s+Option 'densty' is not accepted", said)
    content["trainer"]["strategy"]["init_args"] = {"compressor": "micro", "wire_dtyp": "int4"}
    said = said_of(configure, capsys, f"--config={written(content, tmp_path)}")
    assert "Option 'wire_dtyp' is not accepted" in said
    typed = [f"{STRATEGY}=SparseDDPStrategy", f"{STRATEGY}.compressor=MiCRO", f"{STRATEGY}.compressor.densty=0.05"]
    assert "densty" in said_of(configure, capsys, *typed)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("true", ls.Elastic()),
        ('{"class_path": "lightning_sparse.Elastic", "init_args": {"timeout": 20}}', ls.Elastic(timeout=20)),
    ],
    ids=["true", "with_settings"],
)
def test_a_config_can_say_that_hosts_come_and_go(configure: Configure, written: str, meant: ls.Elastic) -> None:
    strategy = configure(f"--config={CONFIGS / 'local_steps.yaml'}", "--trainer.strategy.elastic", written)
    assert strategy.options.hosts == meant


@pytest.mark.parametrize("meant", [2, "node", "auto"])
def test_a_config_can_say_which_ranks_are_a_member(configure: Configure, tmp_path: Path, meant: int | str) -> None:
    content = config("micro")
    content["trainer"]["strategy"]["init_args"]["local_group"] = meant
    assert configure(f"--config={written(content, tmp_path)}").options.local_group == meant
