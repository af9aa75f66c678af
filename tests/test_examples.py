import ast
import contextlib
import io
import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_sparse as ls
from tests.support.elastic import Lighthouse, as_a_host
from tests.support.models import Does, trainer, weights
from tests.support.processes import LIMIT_S, Ranks, free_port

EXAMPLES = Path(__file__).parent.parent / "examples"

# The same warnings as the examples ignore for their users (pytest resets the filters before each test).
pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]


@pytest.fixture(autouse=True)
def examples_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


# - as their readers run them


def scripts():
    return sorted(file.name for file in EXAMPLES.iterdir() if file.suffix in {".py", ".sh"})


@pytest.mark.parametrize("name", scripts())
def test_each_file_begins_with_the_command_that_runs_it(name):
    text = (EXAMPLES / name).read_text()
    if name.endswith(".py"):
        head = ast.get_docstring(ast.parse(text), clean=False)
    else:
        assert text.startswith("#!/usr/bin/env bash\n")
        head = "\n".join(line.removeprefix("# ") for line in itertools.takewhile(str.strip, text.splitlines()[1:]))
    assert re.match(r"[A-Z].*[.:]\n", head)
    assert re.search(rf"^    \S.*examples/{re.escape(name)}", head, re.MULTILINE)


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    files = [file for file in EXAMPLES.rglob("*") if file.suffix in {".py", ".sh", ".yaml", ".ipynb"}]
    assert len(files) > 10
    assert {file.relative_to(EXAMPLES).as_posix() for file in files} <= listed
    assert all((EXAMPLES / target).exists() for target in listed)


BY_NAME = EXAMPLES / "configs" / "by_name.yaml"


def run(command: list[str], time_limit: float) -> str:
    """Run a command, end every process that it started, and say what went wrong (nothing: an empty string)."""
    process = subprocess.Popen(command, start_new_session=True)  # a process group of its own
    try:
        exit_code = process.wait(time_limit)
    except subprocess.TimeoutExpired:
        return f"not finished after {time_limit:g} seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
    return f"exit code {exit_code}" if exit_code else ""


@pytest.mark.programs
def test_it_runs_as_a_script(tmp_path, monkeypatch, capfd):
    """Lightning starts the second process, by running the same command again."""
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs and checkpoints here
    command = f"{EXAMPLES}/cli.py fit --config {BY_NAME} --trainer.strategy micro --trainer.max_steps 5"
    failure = run([sys.executable, *command.split()], time_limit=LIMIT_S)
    out, err = capfd.readouterr()
    assert not failure, f"{failure}\n{err}"
    assert "MEMBER: 2/2" in err
    assert "MiCRO(density=0.05) averages" in out + err


def run_script(rank, size, name, arguments, folder):
    """Run an example as one of torchrun's processes; returns what it printed."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def test_quickstart_shows_what_was_sent(ranks: Ranks, tmp_path):
    out, other = ranks.run(run_script, 2, "quickstart.py", [], str(tmp_path))
    assert "116.26 kB" in out  # what dense DDP would have sent: 4 * 29,066 bytes
    assert "116.26 kB" not in other  # rank 0 speaks


def test_own_compressor_learns(ranks: Ranks, tmp_path):
    out, _ = ranks.run(run_script, 2, "own_compressor.py", [], str(tmp_path))
    assert float(re.search(r"val_acc: (.*)", out)[1]) > 0.85


def test_own_compressor_keeps_the_law():
    from own_compressor import Signs

    n = 1003
    gradients = torch.randn(6, 3, n, generator=torch.Generator().manual_seed(0))
    result = ls.simulate(Signs(), gradients)
    torch.testing.assert_close(3 * result.mean.sum(0) + result.unsent.sum(0), gradients.sum((0, 1)))
    assert result.sent_bytes.unique().tolist() == [2 * (-(-n // 8) + 4)]  # to two others: bits, and a scale


@pytest.mark.timeout(2 * LIMIT_S + 20)
@pytest.mark.parametrize("name", ["plain_pytorch.py", "fabric_loop.py"])
def test_a_loop_of_ones_own_saves_and_resumes(ranks: Ranks, name, tmp_path):
    def run(epochs, checkpoint, *arguments):
        arguments = [f"--epochs={epochs}", f"--checkpoint={checkpoint}", *arguments]
        out, other = ranks.run(run_script, 2, name, arguments, str(tmp_path))
        assert not other  # rank 0 speaks
        return re.findall(r"epoch (\d+): loss", out), torch.load(tmp_path / checkpoint, weights_only=True)

    first, half = run(1, "half.ckpt")
    second, resumed = run(2, "resumed.ckpt", "--resume=half.ckpt")
    assert (first, second) == (["0"], ["1"])
    assert resumed["epochs"] == 2
    assert resumed["unsent"]["steps"] == 2 * half["unsent"]["steps"] > 0
    if name == "plain_pytorch.py":  # where the order of the data is resumed, too
        _, straight = run(2, "straight.ckpt")
        for part in (lambda saved: saved["model"], lambda saved: saved["unsent"]["unsent"]):
            assert part(resumed).keys() == part(straight).keys()
            assert all(tensor.equal(part(straight)[key]) for key, tensor in part(resumed).items())


def finetune(rank, size):
    sys.path.insert(0, str(EXAMPLES))
    from finetune import BODY, HEAD, STEM, DigitsClassifier, FineTuned, FreezeAtFirst, SomeDigits

    L.seed_everything(0)
    pretrained, model = DigitsClassifier(width=8), FineTuned(width=8)
    model.take_over(pretrained)

    def parts(module):
        return [weights(module.get_submodule(part)).clone() for part in (STEM, BODY, HEAD)]

    diary = Does("on_train_epoch_end", lambda run: parts(run.lightning_module))
    diary.found.append(parts(pretrained))
    few = {"limit_train_batches": 5, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    strategy, callbacks = "skip_reduce_find_unused_parameters_true", [FreezeAtFirst(epoch=1), diary]
    run = trainer(strategy, size, max_epochs=2, callbacks=callbacks, **few)
    run.fit(model, SomeDigits(range(5, 10)))
    return diary.found, [group["lr"] for group in run.optimizers[0].param_groups]


def test_finetuning_freezes_what_it_says(ranks: Ranks):
    results = ranks.run(finetune, 2)
    (before, first, second), rates = results[0]
    changed = [[not a.equal(b) for a, b in zip(x, y, strict=True)] for x, y in ((before, first), (first, second))]
    assert changed == [[False, False, True], [False, True, True]]  # the stem, the body, the head
    assert rates == pytest.approx([0.005, 0.05])
    assert all(a.equal(b) for a, b in zip(second, results[1][0][2], strict=True))


@pytest.mark.programs
def test_torchrun_joins_two_machines(tmp_path):
    """Two "machines" on the loopback interface, with one process each."""
    settings = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = ["bash", str(EXAMPLES / "multinode_torchrun.sh"), "--strategy", "micro", "--max-steps", "5"]
    outputs = [tmp_path / f"{node}.txt" for node in range(2)]
    machines = []
    for node, output in enumerate(outputs):
        with output.open("w") as file:
            environment = os.environ | settings | {"NODE_RANK": str(node)}
            machines.append(
                subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
            )
    deadline_s = time.monotonic() + 100
    try:
        codes = [machine.wait(deadline_s - time.monotonic()) for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()  # torchrun then ends its processes
            machine.wait(60)
    first, second = (output.read_text() for output in outputs)
    assert codes == [0, 0], first + second
    assert "val_acc: 0." in first  # rank 0 speaks, and there is one
    assert "among 2 ranks" in first
    assert "MEMBER: 2/2" in second
    assert "val_acc" not in second


def test_slurm_starts_as_many_processes_as_the_trainer_expects(tmp_path, monkeypatch):
    """With a made-up ``srun`` that says what it was to run, and what ``sbatch`` would have read."""
    script = EXAMPLES / "multinode_slurm.sh"
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\S+)", script.read_text(), re.MULTILINE))
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"')
    srun.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": asked["nodes"],
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
    }
    started = subprocess.run(
        ["bash", script, "--strategy", "micro"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    program, file, *arguments = started.stdout.split()
    assert (program, file) == ("python", "examples/digits.py")

    import digits

    given = {}
    monkeypatch.setattr(digits.L, "Trainer", lambda **options: given.update(options) or sys.exit())
    monkeypatch.setattr(sys, "argv", ["digits.py", *arguments])
    with pytest.raises(SystemExit):
        digits.main()
    assert given["num_nodes"] == int(asked["nodes"]) == 2
    assert given["devices"] == int(asked["ntasks-per-node"]) == int(asked["gpus-per-node"]) == 4
    assert (given["strategy"], given["accelerator"]) == ("micro", "gpu")


def run_host(rank, size, lighthouse, folder):
    as_a_host(lighthouse)
    arguments = ["--host", f"host{rank}", "--max-steps", "40", "--timeout", "20"]
    return run_script(rank, size, "elastic.py", arguments, folder)


def test_hosts_come_and_go(ranks: Ranks, tmp_path):
    pytest.importorskip("torchft")
    with Lighthouse(min_hosts=2) as lighthouse:
        outs = ranks.run(run_host, 2, lighthouse.address, str(tmp_path))
    for rank, out in enumerate(outs):
        assert f"host{rank}: 2 hosts at the end" in out
        assert list((tmp_path / "checkpoints" / f"host{rank}").glob("last.ckpt"))
    assert len({re.search(r"val_acc: (.*)", out)[1] for out in outs}) == 1


def test_a_sharded_model_trains(ranks: Ranks, tmp_path):
    """With the arguments of its first lines, and a narrower model."""
    arguments = ["--replicate-size", "2", "--devices", "4", "--max-steps", "2", "--width", "20"]
    out = ranks.run(run_script, 4, "sharded.py", arguments, str(tmp_path))[0]
    assert float(re.search(r"train_loss: (.*) nats", out)[1]) < 8
