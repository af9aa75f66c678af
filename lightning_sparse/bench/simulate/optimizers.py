"""Optimizers of simulated trainings, and their learning rate."""

import math
from collections.abc import Callable

from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from lightning_sparse.bench.compare.workloads import ByteGPT

WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # of the steps; then the learning rate falls as a cosine, to 0


def _adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)]


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), momentum=0.9)]


def _muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of the blocks, with steps as long as AdamW's, which the others get."""
    if not isinstance(model, ByteGPT):
        raise ValueError("--optimizer muon must be given with --task byte_lm, whose blocks have matrices; got another")
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = set(matrices)
    others = [p for p in model.parameters() if p not in known]
    return [
        Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, weight_decay=WEIGHT_DECAY),
    ]


#: Name -> what makes the optimizers of a model; all of them take the same learning rate.
OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {"adamw": _adamw, "sgd": _sgd, "muon": _muon}


def learning_rate(peak: float, step: int, steps: int) -> float:
    """The learning rate of a step: a warm-up to ``peak``, then a cosine to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
