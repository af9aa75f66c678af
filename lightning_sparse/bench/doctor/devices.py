"""Checks of one CUDA device: the compressors among simulated ranks, and the kernels' times."""

import torch
from rich.console import Console

from lightning_sparse.bench import kernels
from lightning_sparse.bench.doctor.checked_model import TOLERANCE
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.kernels.ops import HAS_TRITON
from lightning_sparse.simulation import simulate

STEPS, RANKS, ELEMENTS = 10, 4, 100_000


def show(console: Console) -> list[str]:
    """Print the times of the kernels on the current CUDA device; returns what is wrong with the compressors on it."""
    wrong = conserves(torch.device("cuda"))
    if HAS_TRITON:
        console.print(f"Kernels, {kernels.ELEMENTS:,} elements on {torch.cuda.get_device_name()}", highlight=False)
        console.print(kernels.measure(kernels.ELEMENTS))
    return wrong


def conserves(device: torch.device) -> list[str]:
    """Simulate ten steps of each compressor among four ranks on ``device``; say which lost or made up gradient."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(STEPS, RANKS, ELEMENTS, generator=generator).to(device)
    wrong = []
    for name in COMPRESSORS:
        try:
            result = simulate(name, gradients, torch.ones(ELEMENTS, device=device))
        except Exception as error:
            wrong.append(f"{name} failed on {device} among {RANKS} simulated ranks: {type(error).__name__}: {error}")
            continue
        left = RANKS * result.mean.double().sum(0) + result.unsent.double().sum(0)
        right = gradients.double().sum((0, 1))
        part = float((left - right).abs().max() / right.abs().max())
        if not part <= TOLERANCE:
            wrong.append(
                f"{name} on {device}: gradient was lost or made up ({part:.1e} of the largest). Please report."
            )
    return wrong
