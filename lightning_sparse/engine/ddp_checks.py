"""What of a DistributedDataParallel is averaged, and what cannot work with a communication hook."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.checks import uncompiled


def averaged_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that ``ddp`` averages, by name, in the order of definition.

    Raises:
        ValueError: if one of them cannot be averaged, or gradients are not handed over in buckets.
    """
    check_reducer(ddp)
    for name, child in ddp.module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"{name} must be an embedding with sparse=False; got sparse=True, whose gradient has no dense layout "
                "to send a part of."
            )
    parameters = {
        uncompiled(name): parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"parameter {name} must be float32, bfloat16 or float16; got {parameter.dtype}. Convert it or freeze "
                "it: gradients are averaged and kept in float32."
            )
    devices = dict.fromkeys(str(parameter.device) for parameter in parameters.values())
    if len(devices) > 1:
        raise ValueError(
            f"all trained parameters must lie on one device; got {', '.join(devices)}. Give each rank one device: "
            "groups and messages of a model that is split would mix them."
        )
    return parameters


# - what cannot work with a communication hook: PyTorch would crash, or train on what was not averaged


def check_reducer(ddp: DistributedDataParallel) -> None:
    """Raise a ValueError if ``ddp`` hands its hook each gradient with its parameter, and not buckets of gradients.

    DistributedDataParallel looks at the setting when it is made.
    """
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "torch._dynamo.config.optimize_ddp must be 'ddp_optimizer' (True) or 'no_optimization' (False) when "
            "DistributedDataParallel is made; got 'python_reducer', which hands no buckets to a communication hook. "
            "Leave the setting as it is by default."
        )


def check_not_capturing() -> None:
    """Raise a RuntimeError while a CUDA graph is captured: a replay would launch messages without the host's part.

    The host chooses in each step what is sent, counts the steps and changes groups; a replay repeats the captured one.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step must not be captured in a CUDA graph: what is sent differs from step to step, and a replay would "
            "send what the captured step has sent; got a capture under way. Capture the model alone, before it is "
            "wrapped (torch.cuda.make_graphed_callables, or torch.compile(mode='reduce-overhead')), and leave "
            "DistributedDataParallel, its backward and the optimizer's step outside."
        )


def check_trains(module: nn.Module, name: str = "a model") -> None:
    """Raise a ValueError if no parameter of ``module`` is trained; ``name`` is what the error calls it."""
    parameters = list(module.parameters())
    if not any(p.requires_grad for p in parameters):
        got = f"{len(parameters)} parameters, all frozen" if parameters else "a model without parameters"
        raise ValueError(
            f"{name} must have a parameter that requires a gradient, or there is nothing to train; got {got}. Make "
            "layers in __init__ or configure_model, and set requires_grad=True on what is to be trained."
        )


def check_may_begin(ddp: DistributedDataParallel | None, error: BaseException | None) -> None:
    """Raise what keeps a forward of ``ddp`` from beginning: the ``error`` of a step before, or what cannot work."""
    if error is not None:
        raise error
    check_not_capturing()
    if ddp is not None:
        _check_first_synchronised(ddp)


def check_still_frozen(frozen: Sequence[tuple[str, Tensor]], wrapper: str, to_freeze: str, hosts: bool) -> None:
    """Raise a RuntimeError if a parameter of ``frozen`` is trained now, which ``wrapper`` does not average.

    ``to_freeze`` is what it takes to freeze one meanwhile; with other ``hosts`` one rank is not alone.
    """
    thawed = [name for name, parameter in frozen if parameter.requires_grad]
    if thawed and (hosts or dist.get_world_size() > 1) and torch.is_grad_enabled():
        raise RuntimeError(
            f"{', '.join(thawed)} required no gradient when {wrapper} was set up, so it does not average "
            f"them and the ranks would drift apart. Set requires_grad=False only after setup (in on_train_start"
            f"{to_freeze}), or start a new fit after unfreezing."
        )


def _check_first_synchronised(ddp: DistributedDataParallel) -> None:
    """Raise a RuntimeError if the first backward of a static graph is not to be synchronised: DDP learns it there."""
    is_first = not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)
    if ddp.static_graph and is_first and not ddp.require_backward_grad_sync and torch.is_grad_enabled():
        raise RuntimeError(
            "with static_graph=True the first backward must be synchronised, since DDP learns the graph in it; got a "
            "first forward within no_sync(), after which PyTorch crashes (expect_autograd_hooks_). Leave out "
            "static_graph=True, or accumulate from the second step on."
        )
