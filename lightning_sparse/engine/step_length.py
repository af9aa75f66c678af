"""Whether a longer learning rate makes the steps of an optimizer longer, in proportion."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.checks import is_number

PLAIN = {"fused": False, "capturable": False, "foreach": False}  # which runs on any CPU
OF_SCHEDULES = {"params", "lr", "initial_lr"}  # what of a group says nothing about the length of its steps
RATES = (2.0**-6, 2.0**6)  # short, and longer than any that an optimizer goes by which has a longest step
STEPS = (1, 3)  # the first step, and one that may go by what earlier ones have left
SHAPES = ((1,), (2, 2))  # of the parameter: any, and of a matrix for those that train nothing else


def step_grows(optimizer: Optimizer) -> bool:
    """Return whether each step of ``optimizer`` is twice as long where all learning rates are twice as long.

    Others of its class and the settings of its groups take a few steps with one parameter, on the CPU.  Of one that
    cannot be made so, as where it is made around another, whose steps are not all that it does, nobody knows.
    """
    try:
        return all(_grows(optimizer, group) for group in _different(optimizer.param_groups))
    except Exception:  # whatever else it needs
        return False


def _different(groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One of those of ``groups`` that differ in their parameters and learning rates alone."""
    seen = set()
    for group in groups:
        settings = repr(sorted((key, repr(x)) for key, x in group.items() if key not in OF_SCHEDULES))
        if settings not in seen:
            seen.add(settings)
            yield group


def _grows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not (isinstance(rate := group.get("lr"), Tensor) or is_number(rate)):
        return False
    for shape in SHAPES:
        try:
            return all(_is_in_proportion(optimizer, group, shape, rate, steps) for rate in RATES for steps in STEPS)
        except Exception:
            if shape == SHAPES[-1]:
                raise
    return False


def _is_in_proportion(
    optimizer: Optimizer, group: dict[str, Any], shape: Sequence[int], rate: float, steps: int
) -> bool:
    """Whether the last of so many ``steps``, all but the last at ``rate``, is twice as long at twice the rate."""
    once, twice = (_last_step(optimizer, group, shape, [*(steps - 1) * [rate], last]) for last in (rate, 2 * rate))
    return bool(once.any()) and torch.allclose(2 * once, twice, rtol=0.01)


def _last_step(optimizer: Optimizer, group: dict[str, Any], shape: Sequence[int], rates: Sequence[float]) -> Tensor:
    """How far another optimizer moves a parameter in the last of steps at these ``rates``."""
    eager: Any = torch.compiler.set_stance("force_eager")  # nothing is compiled for a step or two
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.inference_mode(False), eager:
        weight = nn.Parameter(torch.ones(shape, dtype=torch.float32, device="cpu"))
        before = weight.detach().clone()
        settings: dict[str, Any] = {
            key: PLAIN.get(key, x.detach().cpu() if isinstance(x, Tensor) else x)
            for key, x in group.items()
            if key not in {"params", "initial_lr"}
        }
        known = inspect.signature(type(optimizer)).parameters
        other: Any = type(optimizer)(
            [{**settings, "params": [weight]}], **{key: x for key, x in settings.items() if key in known}
        )
        own = other.param_groups[0]
        for step, rate in enumerate(rates):
            before.copy_(weight.detach())
            given = torch.full_like(own["lr"], rate, device="cpu") if isinstance(own["lr"], Tensor) else rate
            own["lr"] = given
            weight.grad = torch.full_like(weight, 1.0 + step / 4)
            other.step()
            if own["lr"] is not given:  # it sets its rate itself
                return torch.zeros_like(before)
        return weight.detach() - before
