"""P ranks in one process, in lockstep: for trying a compressor on gradients, and for testing one without processes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor, Dense, by_name
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import rounded
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import dense
from lightning_sparse.wire import wire_format


@dataclass(frozen=True)
class Simulated:
    """The result of :func:`simulate`.  T = steps, P = ranks, n = elements."""

    mean: Tensor  # [T, n] float32, the averaged gradient of each step, the same on every rank
    unsent: Tensor  # [P, n] float32, what each rank still keeps after the last step
    sent_bytes: Tensor  # [T, P] int64, bytes each rank put on the wire in each step
    picked: Tensor  # [T] int64, distinct elements updated in each step


def simulate(
    compressor: str | Compressor,
    gradients: Tensor,
    weights: Tensor | None = None,
    *,
    wire_dtype: str = "float32",
) -> Simulated:
    """Run ``compressor`` on recorded or made-up gradients, all ranks in this process.

    The ranks take turns message by message.  Every result is filled with NaN until its round has ended, and messages
    that do not match are an assertion that names the ranks, where real processes would hang.

    Args:
        compressor: an instance, or a name in ``COMPRESSORS``.
        gradients: [T, P, n] floating point: of each step, on each rank.
        weights: [n], the parameters' values, for compressors that look at them; zeros if not given.
        wire_dtype: of values on the wire: "float32", "bfloat16", "float16", "int8", "int4", "int2" or "sign".

    Raises:
        ValueError: for shapes that do not fit, an unknown compressor or an unknown ``wire_dtype``.
        AssertionError: if ranks launch different messages, end with different totals, or touch a tensor in flight.

    >>> gradients = torch.ones(3, 4, 8)  # 3 steps, 4 ranks, 8 elements
    >>> simulate("skip_reduce", gradients).mean.shape
    torch.Size([3, 8])
    """
    if gradients.ndim != 3 or gradients.shape[1] == 0 or not gradients.is_floating_point():
        raise ValueError(
            f"gradients must be [steps, ranks, elements] in floating point; got {gradients.dtype} "
            f"{list(gradients.shape)}."
        )
    steps, size, n = gradients.shape
    if weights is None:
        weights = torch.zeros(n, dtype=torch.float32, device=gradients.device)
    if weights.shape != (n,):
        raise ValueError(f"weights must be [n] = [{n}], one for each element; got {list(weights.shape)}.")
    compressor = by_name(compressor)
    if compressor.is_dense("gradient", n):
        compressor = Dense()
    network, compressor = SimNetwork(size), rounded(compressor, wire_format(wire_dtype).name)
    groups = [Group(0, ("gradient",), (weights,)) for _ in range(size)]

    means, sent_bytes, picked = [], [], []
    for gradient in gradients:
        for group, own in zip(groups, gradient, strict=True):
            compressor.accumulate(group, [own], size)
        before = [comm.sent_bytes for comm in network.comms]
        means.append(dense(take_steps(compressor, groups, network), n) / size)
        sent_bytes.append([comm.sent_bytes - b for comm, b in zip(network.comms, before, strict=True)])
        picked.append(int(groups[0].picked))
    return Simulated(
        mean=torch.stack(means) if means else gradients.new_empty((0, n), dtype=torch.float32),
        unsent=torch.stack([group.unsent for group in groups]),
        sent_bytes=torch.tensor(sent_bytes, dtype=torch.int64, device="cpu").reshape(steps, size),
        picked=torch.tensor(picked, dtype=torch.int64, device="cpu"),
    )
