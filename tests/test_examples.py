import sys
from pathlib import Path

import lightning as L
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"

# The same warnings as the examples ignore for their users (pytest resets the filters before each test).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]


@pytest.fixture(autouse=True)
def examples_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def fit(model, data, max_steps, **options):
    """Train in this process, validate once at the end, and return the metrics."""
    trainer = L.Trainer(
        strategy="auto",
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        val_check_interval=max_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, data)
    return trainer.callback_metrics


def rows(dataset):
    return {image.numpy().tobytes() for image, _ in dataset}


def test_stdlib_files_are_split_in_two():
    from byte_lm import stdlib_files

    training, validation = stdlib_files()
    assert stdlib_files() == (training, validation)
    assert training
    assert validation
    assert not set(training) & set(validation)


def test_byte_windows_are_deterministic_and_shifted_by_one():
    from byte_lm import StdlibBytes

    first, second = (StdlibBytes(context=16, max_bytes=10_000) for _ in range(2))
    first.setup("fit")
    second.setup("fit")
    inputs, targets = first.train.tensors
    assert torch.equal(inputs, second.train.tensors[0])
    assert torch.equal(first.val.tensors[0], second.val.tensors[0])
    assert inputs.shape == targets.shape == (9_999 // 16, 16)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])


def test_byte_lm_has_about_a_million_parameters():
    from byte_lm import ByteLM

    assert sum(p.numel() for p in ByteLM().parameters()) == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("tie_weights", [False, True])
def test_byte_lm_sees_only_the_past(tie_weights):
    from byte_lm import ByteLM

    torch.manual_seed(0)
    model = ByteLM(d_model=16, layers=2, heads=2, context=8, tie_weights=tie_weights)
    tokens = torch.randint(256, (1, 8), dtype=torch.uint8)
    changed = tokens.clone()
    changed[0, 5] += 1
    before, after = model(tokens), model(changed)  # [1, 8, 256]
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_byte_lm_loss_falls():
    from byte_lm import ByteLM, StdlibBytes

    torch.manual_seed(0)
    data = StdlibBytes(context=32, max_bytes=200_000)
    metrics = fit(ByteLM(d_model=32, layers=1, heads=2, context=32, lr=1e-2), data, max_steps=60, limit_val_batches=10)
    assert metrics["val_loss"] < 4  # at the start: log(256) = 5.5


def test_digits_split_is_deterministic_disjoint_and_stratified():
    from digits import Digits

    first, second = Digits(), Digits()
    first.setup("fit")
    second.setup("fit")
    for one, other in ((first.train, second.train), (first.test, second.test)):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert len(rows(first.train) | rows(first.test)) == 1797
    assert not rows(first.train) & rows(first.test)
    labels = first.test.tensors[1]
    assert len(labels) == 360
    assert torch.bincount(labels).min() >= 34


def test_digits_learns():
    from digits import Digits, DigitsClassifier

    torch.manual_seed(0)
    metrics = fit(DigitsClassifier(lr=0.1), Digits(batch_size=64), max_steps=100)
    assert metrics["val_acc"] >= 0.95


def test_demo_says_what_was_saved():
    from demo import human_bytes, summary

    assert human_bytes(12) == "12 B"
    assert human_bytes(2_668_000) == "2.668 MB"
    dense = {"val_loss": 2.30, "sparse/sent_bytes": 6e6}
    sparse = {"val_loss": 2.31, "sparse/sent_bytes": 4e6}
    assert summary(dense, sparse) == (
        "Each rank sent 4 MB a step instead of 6 MB: 1.5 times less; final loss 2.31 against 2.30."
    )
    assert "no counts" in summary({"val_loss": 2.3}, {"val_loss": 2.3})


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp"])
def test_digits_runs_as_a_script(strategy, tmp_path, monkeypatch, capfd):
    from demo import run

    monkeypatch.chdir(tmp_path)  # Lightning writes its logs and checkpoints here
    command = [sys.executable, str(EXAMPLES / "digits.py")]
    command += ["--strategy", strategy, "--devices", "2", "--max-steps", "5"]
    failure = run(command, time_limit=100)
    out, err = capfd.readouterr()
    assert not failure, f"{failure}\n{err}"
    assert "val_acc: 0." in out
