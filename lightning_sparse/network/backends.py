"""Which backend of torch.distributed carries tensors of a kind of device."""

import torch
import torch.distributed as dist


def carries_by_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` sends tensors on ``device`` over NCCL, and not over Gloo.

    The group itself is asked: "gloo", "nccl", "nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl" and no name at all are names
    that users give, and one group may have several backends.

    Raises:
        ValueError: it has no backend for such tensors, or one that is neither.
    """
    try:
        name = str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        raise ValueError(
            f"the process group must have a backend for tensors on {device.type}; got {dist.get_backend_config(group)}."
            f" Start it with init_process_group({'nccl' if device.type == 'cuda' else 'gloo'!r})."
        ) from None
    if name != "gloo" and not name.startswith("nccl"):
        raise ValueError(
            f"the backend of the process group for tensors on {device.type} must be gloo or nccl; got {name}. Start it "
            f"with init_process_group({'nccl' if device.type == 'cuda' else 'gloo'!r})."
        )
    return name != "gloo"
