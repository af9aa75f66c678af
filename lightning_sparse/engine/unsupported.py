"""What cannot work with a communication hook: refused, where PyTorch would crash, or train on what was not averaged."""

import torch
from torch.nn.parallel import DistributedDataParallel


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


def check_may_begin(ddp: DistributedDataParallel | None, error: BaseException | None) -> None:
    """Raise what keeps a forward of ``ddp`` from beginning: the ``error`` of a step before, or what cannot work."""
    if error is not None:
        raise error
    check_not_capturing()
    if ddp is not None:
        _check_first_synchronised(ddp)


def _check_first_synchronised(ddp: DistributedDataParallel) -> None:
    """Raise a RuntimeError if the first backward of a static graph is not to be synchronised: DDP learns it there."""
    is_first = not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)
    if ddp.static_graph and is_first and not ddp.require_backward_grad_sync and torch.is_grad_enabled():
        raise RuntimeError(
            "with static_graph=True the first backward must be synchronised, since DDP learns the graph in it; got a "
            "first forward within no_sync(), after which PyTorch crashes (expect_autograd_hooks_). Leave out "
            "static_graph=True, or accumulate from the second step on."
        )
