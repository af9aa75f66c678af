"""Train the same model twice, sending all of the gradient and then a part of it, and compare.

    python examples/demo.py                   # the byte language model, 4 processes on this machine
    python examples/demo.py --task digits

Each training is a run of this same script with --result, which names the file for its figures.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["byte_lm", "digits"], default="byte_lm")
    parser.add_argument("--strategy", default="skip_reduce")
    parser.add_argument("--baseline", default="sparse_dense", help="the strategy to compare with")
    parser.add_argument("--devices", type=int, default=4, help="number of processes")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=600, help="seconds that one training may take")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result:
        train(args)
    else:
        compare(args)


def train(args: argparse.Namespace) -> None:
    """Train once with ``args.strategy`` and write the figures to ``args.result``."""
    # Imported here: the process that only compares needs none of it.
    import lightning as L
    from lightning.pytorch.callbacks import RichProgressBar, Timer

    import lightning_sparse

    logging.disable(logging.INFO)  # the progress bar without the start-up messages
    L.seed_everything(args.seed)
    model, data = build(args.task)
    timer = Timer()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.max_steps,
        val_check_interval=args.max_steps,  # validate once, at the end
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[lightning_sparse.CompressionMonitor(table=False, summary=False), RichProgressBar(), timer],
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
        figures["fit_seconds"] = timer.time_elapsed("train")
        figures["step_seconds"] = (timer.time_elapsed("train") - timer.time_elapsed("validate")) / args.max_steps
        args.result.write_text(json.dumps(figures))


def build(task: str):
    """Build the model and the data module of a task."""
    if task == "digits":
        from digits import Digits, DigitsClassifier

        return DigitsClassifier(), Digits()
    from byte_lm import ByteLM, StdlibBytes

    return ByteLM(), StdlibBytes()


def compare(args: argparse.Namespace) -> None:
    """Train with both strategies and print what the second one saved."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in (args.baseline, args.strategy):
            console.rule(f'{args.task}, {args.devices} processes, Trainer(strategy="{strategy}")')
            result = Path(folder) / f"{len(results)}.json"
            command = [sys.executable, __file__, "--task", args.task, "--strategy", strategy]
            command += ["--devices", str(args.devices), "--max-steps", str(args.max_steps)]
            command += ["--seed", str(args.seed), "--result", str(result)]
            exit_code = run(command, args.time_limit)
            if exit_code:
                sys.exit(f'The training with strategy="{strategy}" failed: {exit_code}. Its error is above.')
            results.append(json.loads(result.read_text()))

    dense, sparse = results
    console.print(table(args, dense, sparse))
    console.print(summary(dense, sparse))
    console.print(
        "All processes ran on this machine, where sending costs next to nothing: "
        "the bytes are what is saved here, not the time. Over a slow network fewer bytes are less time."
    )


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


def table(args: argparse.Namespace, dense: dict[str, float], sparse: dict[str, float]) -> Table:
    rows = [
        ("validation loss", "val_loss", "{:.3f}".format),
        ("validation accuracy", "val_acc", "{:.1%}".format),
        ("training loss, last batch", "train_loss", "{:.3f}".format),
        ("sent per step and process", "sparse/sent_bytes", human_bytes),
        ("compression ratio", "sparse/compression_ratio", "{:.2f}".format),
        ("time to train", "fit_seconds", "{:.1f} s".format),
        ("time per step", "step_seconds", "{:.3f} s".format),
    ]
    table = Table("", args.baseline, args.strategy, title=f"{args.task} after {args.max_steps} steps")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, key, text in rows:
        if key != "val_acc" or key in dense:
            table.add_row(label, *(text(figures[key]) if key in figures else "-" for figures in (dense, sparse)))
    return table


def summary(dense: dict[str, float], sparse: dict[str, float]) -> str:
    """Say in one sentence what was saved, and at what loss."""
    losses = f"final loss {sparse['val_loss']:.2f} against {dense['val_loss']:.2f}"
    before, now = dense.get("sparse/sent_bytes"), sparse.get("sparse/sent_bytes")
    if not before or not now:
        return f"There are no counts of sent bytes to compare; {losses}."
    return (
        f"Each rank sent {human_bytes(now)} a step instead of {human_bytes(before)}: "
        f"{before / now:.1f} times less; {losses}."
    )


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


if __name__ == "__main__":
    main()
