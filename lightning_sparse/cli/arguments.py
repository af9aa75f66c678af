"""The arguments of every command."""

import argparse
from pathlib import Path

from lightning_sparse.cli.names import MODEL_FORMS, TASKS, WORKLOADS


def parser() -> argparse.ArgumentParser:
    """Make the parser of every command."""
    every = argparse.ArgumentParser("lightning-sparse", description="Gradient compression for PyTorch Lightning.")
    commands = every.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the compressors")
    advise, bench, scale = _add_advise(commands), _add_bench(commands), _add_scale(commands)
    simulate, doctor = _add_simulate(commands), _add_doctor(commands)
    for command in (advise, bench, doctor):
        command.add_argument(
            "--interface",
            help="network interface to use and to count on a real cluster (default: the one towards rank 0)",
        )
    for command in (bench, scale, simulate):
        command.add_argument("--output", metavar="DIR", type=Path, default=Path("bench-results"), help="(%(default)s)")
    return every


def _add_advise(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    advise = commands.add_parser(
        "advise",
        help="say whether compression pays for your model and link, and which",
        description="Train a few steps of your model, measure, and say what to expect of every strategy. The link is "
        "measured between ranks (--emulate, or started on every host with torchrun or srun), or given (--link).",
    )
    advise.add_argument("model", help=f"{MODEL_FORMS}, or one of {', '.join(WORKLOADS)}")
    advise.add_argument("--link", metavar="CLUSTER", default="", help="predict for a cluster such as 4x1gbit")
    advise.add_argument("--emulate", metavar="CLUSTER", default="", help="build such a cluster here (Linux)")
    return advise


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine or cluster has, what will be used, and what is wrong",
        description="Look at versions, devices and interfaces, measure the link between hosts, and train ten steps of "
        "each strategy on a small model: every step is checked for lost gradient and for replicas that differ. Started "
        "with torchrun or srun it examines that cluster; else this machine, with two ranks on the CPU, and one on each "
        "CUDA device, whose kernels it times. The exit status is 1 if anything is wrong.",
    )
    doctor.add_argument("--emulate", metavar="CLUSTER", default="", help="build one here, such as 2x100mbit (Linux)")
    return doctor


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    bench = commands.add_parser(
        "bench",
        help="compare strategies on a cluster, emulated or real",
        description="Train the same model with each strategy in turn, and compare time, bytes and loss. Start it once "
        "with --emulate, or on every host of a cluster with torchrun or srun.",
    )
    bench.add_argument(
        "--emulate",
        metavar="CLUSTERS",
        default="",
        help="clusters to build on this machine (Linux), such as 4x1gbit or 4x1gbit,4x100mbit+50ms, where each host is "
        "50 ms from another, or 3x1gbit+1x100mbit; without root where user namespaces are allowed",
    )
    bench.add_argument(
        "--workload",
        metavar="NAME",
        default="mlp_25m",
        help=f"what to train (%(default)s): one of {', '.join(WORKLOADS)}, or your own: {MODEL_FORMS}",
    )
    bench.add_argument(
        "--strategies",
        metavar="LIST",
        default="",
        help="comma-separated, such as ddp,skip_reduce:skip=0.5:wire_dtype=bfloat16; the first is the reference of the "
        "ratios; one named twice runs twice (default: all, ddp first)",
    )
    bench.add_argument("--steps", type=int, default=10, help="timed steps of each strategy in a round (%(default)s)")
    bench.add_argument("--warmup", type=int, default=3, help="untimed steps before them (%(default)s)")
    bench.add_argument("--rounds", type=int, help="turns of each strategy (one for each of --seeds, or 5)")
    bench.add_argument(
        "--until-loss",
        metavar="LIST",
        default="",
        help="losses on held-out data, such as 3.2,3,2.8: report the seconds, steps and bytes to each; a training ends "
        "with the lowest (byte_lm, gpt_10m and gpt_50m)",
    )
    bench.add_argument(
        "--seconds", type=float, help="with --until-loss, train each strategy for so long in place of --steps"
    )
    bench.add_argument(
        "--learning-rates",
        metavar="LIST",
        default="",
        help="with --until-loss, try these with each strategy in the first round; the others use its best",
    )
    bench.add_argument("--seeds", metavar="LIST", default="", help="of the rounds, in turn (0,1,2,...)")
    bench.add_argument(
        "--simulate",
        metavar="BENCH.jsonl,SIMULATE.jsonl",
        default="",
        help="with --until-loss, train nothing: combine the steps that an earlier bench of byte_lm measured with the "
        "losses of simulate",
    )
    bench.add_argument("--plot", action="store_true", help="draw plots too")
    return bench


def _add_scale(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    scale = commands.add_parser(
        "scale",
        help="say how bytes and time of communication grow with the number of ranks",
        description="Count what every compressor sends among 2, 4, 8, ... ranks, all of them in this process, for the "
        "gradient of mlp_1m, and model the time that takes on a link. With --emulate, measure up to 16 ranks too, and "
        "fit the link to that. Writes a plot and a JSON file.",
    )
    scale.add_argument(
        "--emulate",
        metavar="RATE",
        default="",
        help="measure on links of this rate, such as 1gbit or 100mbit+50ms (Linux)",
    )
    scale.add_argument(
        "--link", metavar="RATE", default="1gbit", help="rate to model where nothing is measured (%(default)s)"
    )
    scale.add_argument(
        "--most",
        metavar="RANKS",
        type=int,
        default=1024,
        help="count up to so many (%(default)s, which takes an hour and 7 GB of memory; 256: five minutes)",
    )
    return scale


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    simulate = commands.add_parser(
        "simulate",
        help="say what strategies cost in loss, without a cluster",
        description="Train a small model with each strategy among simulated ranks, all of them in this process, and "
        "compare bytes and validation loss. A run that was interrupted goes on where it stopped.",
    )
    simulate.add_argument(
        "--task",
        choices=tuple(TASKS),
        default="byte_lm",
        help="byte_lm: a GPT on Python's own source, with AdamW; digits: a small network for handwritten digits, with "
        "SGD and momentum (needs scikit-learn); modules: a bag of embeddings that tells 20 modules of Python apart, "
        "with AdamW, nearly all of whose gradient is zero (%(default)s)",
    )
    simulate.add_argument(
        "--strategies",
        metavar="LIST",
        default="ddp,sparse_dense:wire_dtype=int4,micro:density=0.05:wire_dtype=int4",
        help="comma-separated, as for bench; the first is what the others are compared with (%(default)s)",
    )
    simulate.add_argument("--ranks", type=int, default=4, help="simulated ranks (%(default)s)")
    of_tasks = {each: ", ".join(f"{name}: {kind[each]}" for name, kind in TASKS.items()) for each in ("steps", "rates")}
    simulate.add_argument("--steps", type=int, help=f"optimizer steps of each training ({of_tasks['steps']})")
    simulate.add_argument(
        "--learning-rates",
        metavar="LIST",
        help=f"largest learning rates to try, with the first seed; the best is used with all ({of_tasks['rates']})",
    )
    simulate.add_argument("--seeds", metavar="LIST", default="0,1,2", help="of weights and batches (%(default)s)")
    simulate.add_argument(
        "--optimizer",
        choices=("adamw", "sgd", "muon"),
        help="sgd: with momentum 0.9; muon: for the matrices of byte_lm's blocks, AdamW for the rest (the task's own)",
    )
    return simulate
