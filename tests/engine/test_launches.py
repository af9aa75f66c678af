"""How much a step launches on a device: each launch takes some 5 µs of backward's thread, whatever its size."""

from typing import Any

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.local_steps.second_moments import EARLY
from lightning_sparse.network.costs import DEVICE_SEGMENT_BYTES
from lightning_sparse.wire import wire_format
from tests.support.fake_cuda import FakeCuda, unavailable_reason
from tests.support.on_fake_cuda import Training, gradients, local_steps, on_fake_cuda, parameters

LAYERS = 20
BUCKETS = 10  # of DDP

reason = unavailable_reason()
on_a_fake_device = pytest.mark.skipif(reason is not None, reason=reason or "")


class Steady(FakeCuda):
    """Has the host see that of each rank's part as many elements were sent as ``compressor`` means to send of ``n``."""

    def __init__(self, compressor: ls.Compressor, n: int, size: int) -> None:
        super().__init__()
        self._wanted = round(getattr(compressor, "density", 1.0) * n)
        self._size = size

    def seen(self, dtype: torch.dtype) -> Any:
        return float(self._wanted) if dtype.is_floating_point else self._wanted // self._size


def launched(n: int, layers: int, wire_dtype: str, compressor: ls.Compressor, size: int = 4) -> tuple[int, int, int]:
    """Launches of a step's exchange, messages among them, and groups, for ``n`` elements in ``layers`` parameters.

    Of the third step: in the first two thresholds are found.
    """
    with on_fake_cuda(Steady(compressor, n, size), size=size) as (cuda, nccl):
        of = parameters({f"layer {i}": (n // layers,) for i in range(layers)})
        averager = gradients(nccl, of, compressor, wire_dtype, bucket_bytes=25 * 2**20)
        training = Training(averager, of, min(layers, BUCKETS))
        training.step()
        training.step()
        cuda.launched.clear()
        nccl.messages = 0
        training.step()
        of_training = 2 * layers + min(layers, BUCKETS)  # forward, optimizer, and what fills the buckets
        return cuda.launches - of_training, nccl.messages, len(averager.groups)


@on_a_fake_device
@pytest.mark.parametrize(("n", "layers"), [(10**6, 1), (10**8, LAYERS)])
@pytest.mark.parametrize(("wire_dtype", "most"), [("float32", 3), ("bfloat16", 8), ("int4", 8), ("sign", 8)])
def test_a_dense_step_launches_little(wire_dtype: str, most: int, n: int, layers: int) -> None:
    """At most so much for every 32 MiB of what a rank owns of a group, and two for each parameter."""
    count, messages, groups = launched(n, layers, wire_dtype, ls.Dense())
    own_bytes = wire_format(wire_dtype).nbytes(n // 4)
    segments = max(groups, -(-own_bytes // DEVICE_SEGMENT_BYTES) if wire_dtype != "float32" else 1)
    assert count <= most * segments + 2 * layers
    assert messages <= 2 * segments


@on_a_fake_device
@pytest.mark.parametrize(
    ("compressor", "wire_dtype", "most"),
    [
        (ls.Dense(), "bfloat16", 10), (ls.Dense(), "float16", 10), (ls.SkipReduce(), "float32", 10),
        (ls.MiCRO(), "int4", 40), (ls.MiCRO(balance=False), "bfloat16", 40), (ls.TopK(), "int4", 30),
        (ls.TopK(), "float16", 30), (ls.OkTopk(), "int4", 65), (ls.OkTopk(), "bfloat16", 65),
        (ls.ImportancePruning(givers=4), "int4", 65), (ls.SketchFusion(), "bfloat16", 60), (ls.RandomK(), "int4", 35),
    ],
    ids=repr,
)  # fmt: skip
def test_more_ranks_launch_no_more(compressor: ls.Compressor, wire_dtype: str, most: int) -> None:
    """The same, but for zeros where a vector cannot be cut evenly, or messages of givers that only they fill."""
    counts = [launched(10**6, 1, wire_dtype, compressor, size)[0] for size in (4, 16, 64)]
    assert max(counts) <= most
    if not isinstance(compressor, ls.ImportancePruning):
        assert max(counts) <= counts[0] + 2


@on_a_fake_device
@pytest.mark.parametrize("compressor", [ls.SkipReduce(), ls.LowRank()], ids=repr)
def test_a_compressed_step_launches_little(compressor: ls.Compressor) -> None:
    count, messages, groups = launched(10**9, LAYERS, "int4", compressor)
    assert count <= 10 * groups + 2 * LAYERS
    assert messages <= 2 * groups


def launched_with_adam(settings: dict[str, Any], layers: int) -> tuple[int, int]:
    """Launches of a step with local steps and Adam: the most while ranks compare in each, and the fewest after that."""
    with on_fake_cuda() as (cuda, nccl):
        of = parameters({f"layer {i}": (1000, 1000) for i in range(layers)})
        training = Training(local_steps(nccl, of, ls.Dense(), "int4", **settings), of, adam=True)
        counts = []
        for _ in range(EARLY + 8):
            cuda.launched.clear()
            training.step()
            counts.append(cuda.launches)
        return max(counts[:EARLY]), min(counts[EARLY:])


@on_a_fake_device
def test_second_moments_launch_little() -> None:
    """At most 8 operations for each matrix, and 30 in the first 20 steps, in which ranks compare them each time."""
    layers = 3
    early, later = launched_with_adam({}, layers)
    own_early, own_later = launched_with_adam({"second_moments": "own"}, layers)
    assert later - own_later <= 8 * layers
    assert early - own_early <= 30 * layers + 30


@on_a_fake_device
def test_local_steps_in_the_place_of_another_averager_send_what_is_due_after_its_last_step() -> None:
    """As they do after a resume at that step, so that both go on alike."""
    with on_fake_cuda() as (_, nccl):
        averager = local_steps(nccl, parameters(), ls.Dense(), "int4")
        averager.count_from(4)
        nccl.messages = 0
        averager.between_steps()
        assert nccl.messages > 0
