"""Bad input: gradients, sizes, layouts, settings, checkpoints and messages that nobody should hand over.

Every property is fuzzed, and its tries are counted.  ``BAD_INPUT_TRIES=2000 pytest tests/test_bad_input.py -s`` tries
each that often, with each compressor, and prints how many there were.
"""

import copy
import dataclasses
import functools
import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.auto import switch
from lightning_sparse.checkpoint.state import KEY, State
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.random_k import scattered
from lightning_sparse.engine.groups import Piece, fuse
from lightning_sparse.engine.lane import spread
from lightning_sparse.engine.pending_bucket import PendingBucket
from lightning_sparse.fusion.model import Cost, StepModel
from lightning_sparse.network.costs import traffic
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection import partition
from lightning_sparse.selection.estimate import count, room
from lightning_sparse.selection.host import above, select
from lightning_sparse.selection.sketch import CountSketch
from lightning_sparse.selection.sparse import Sparse, dense
from lightning_sparse.selection.threshold import ThresholdController as Held
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import (
    FLOAT32,
    INDEX_FORMATS,
    WIRE_DTYPES,
    CorruptMessage,
    MessageLayout,
    Selection,
    cheapest,
)
from tests.conftest import EVERY_COMPRESSOR
from tests.training.models import small, unsent

TRIES: Counter[str] = Counter()  # of each property
ASKED = int(os.environ.get("BAD_INPUT_TRIES", "0"))  # of each property with each compressor; 0: a few
LARGE = 2**33
WIRES = st.sampled_from(list(WIRE_DTYPES))
SEEDS = st.integers(0, 2**31)

# Beside the defaults: what works with other arithmetic.
OTHERS = [
    pytest.param(ls.MomentumCorrection(0.9, ls.TopK(density=0.2), clip_norm=0.5), id="momentum"),
    pytest.param(ls.ImportancePruning(density=0.1, rule="fixed", threshold=1.0), id="importance-fixed"),
    pytest.param(ls.ImportancePruning(density=0.1, rule="adaptive", givers=2), id="importance-adaptive"),
    pytest.param(ls.SketchFusion(density=0.1, momentum=0.9), id="sketch_fusion-momentum"),
    pytest.param(ls.OkTopk(density=0.2, evaluate_every=2, repartition_every=2), id="ok_topk-0.2"),
    pytest.param(ls.MiCRO(density=0.9), id="micro-0.9"),
    pytest.param(ls.DensityLadder(1, ls.MiCRO(density=0.01)), id="ladder-micro"),
]
every_compressor = pytest.mark.parametrize("compressor", [*EVERY_COMPRESSOR, *OTHERS])


def fuzzed(quick: int, **values: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hypothesis with ``quick`` tries, or as many as were asked for; each is counted."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            TRIES[test.__name__] += 1
            test(*args, **kwargs)

        checked = settings(
            max_examples=ASKED or quick,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )(given(**values)(counted))
        return pytest.mark.timeout(3600 if ASKED else 60)(checked)

    return decorate


@pytest.fixture(autouse=True, scope="module")
def _table_of_tries() -> Iterator[None]:
    yield
    print("\n\n| property | tries |\n| --- | ---: |")
    for name, tries in TRIES.items():
        print(f"| {name.removeprefix('test_').replace('_', ' ')} | {tries:,} |")
    print(f"| all | {TRIES.total():,} |")


# - gradients


def any_bits(shape: Sequence[int], seed: torch.Generator) -> Tensor:
    """Every float32 is as likely: of 256 one is NaN or infinite, and one is denormal."""
    return torch.randint(-(2**31), 2**31, shape, generator=seed).to(torch.int32).view(torch.float32)


def denormal(shape: Sequence[int], seed: torch.Generator) -> Tensor:
    return torch.randint(-(2**23), 2**23, shape, generator=seed).float() * 2.0**-149


def huge(shape: Sequence[int], seed: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=seed).sign() * 3e38


def special(shape: Sequence[int], seed: torch.Generator) -> Tensor:
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-149, 2.0**-126, 65504, 65520, 3.4028235e38, 3.39e38, -1.0]
    return torch.tensor(values)[torch.randint(len(values), shape, generator=seed)]


def normal(shape: Sequence[int], seed: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=seed)


def zero(shape: Sequence[int], seed: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=seed).sign() * 0.0


@st.composite
def bad_gradients(draw: st.DrawFn) -> Tensor:
    """[T, P, n]: up to three kinds of values mixed, and a few that hypothesis chose."""
    n = draw(st.one_of(st.integers(0, 8), st.integers(0, 200)))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 3)), n)
    seed = torch.Generator().manual_seed(draw(SEEDS))
    kinds = draw(
        st.lists(
            st.sampled_from([normal, zero, denormal, huge, special, any_bits]), min_size=1, max_size=3, unique=True
        )
    )
    which = torch.randint(len(kinds), shape, generator=seed)
    values = torch.stack([kind(shape, seed) for kind in kinds]).gather(0, which[None])[0]
    chosen = draw(st.lists(st.floats(width=32), max_size=6)) if n else []
    places = torch.randint(max(values.numel(), 1), (len(chosen),), generator=seed)
    return values.view(-1).index_copy(0, places, torch.tensor(chosen)).view(shape)


@every_compressor
@fuzzed(15, given=bad_gradients(), wire_dtype=WIRES, weigh=st.booleans())
def test_any_gradient_is_delivered_kept_or_seen(
    compressor: ls.Compressor, given: Tensor, wire_dtype: str, weigh: bool
) -> None:
    """What is not finite, or overflows in a sum, stays to be seen in a mean or in what is unsent; the rest is exact.

    As int8 such a value takes those of its block with it, in a sketch all that are sent; and they are seen too.
    """
    weights = given[0, 0].nan_to_num(0, 1, -1) if weigh else None
    result = simulate(compressor, given, weights, wire_dtype=wire_dtype)
    exact = given.double()
    seen = ~(result.mean.isfinite().all(0) & result.unsent.isfinite().all(0))  # [n]
    assert seen[~given.isfinite().all(0).all(0)].all()
    if isinstance(compressor, ls.MomentumCorrection):
        return  # its law is of velocities
    size, total = given.shape[1], exact.abs().sum((0, 1))
    calm = total < 1e37
    if calm.all() or not (wire_dtype in ("int8", "int4", "sign") or isinstance(compressor, ls.SketchFusion)):
        assert not seen[calm].any()
    lost = (size * result.mean.double().sum(0) + result.unsent.double().sum(0) - exact.sum((0, 1))).abs()
    if (
        wire_dtype == "sign" and total.isfinite().any()
    ):  # what is much smaller than its block's mean is rounded beside it
        lost = lost - 1e-6 * len(given) * size * total[total.isfinite()].max()
    assert (lost <= 4e-6 * total + 1e-42)[calm & ~seen].all()
    assert (lost <= 1e-4 * total + 1e-42)[
        given.isfinite().all(0).all(0) & ~seen
    ].all()  # huge, and yet it did not overflow


@fuzzed(
    200,
    threshold=st.one_of(st.just(math.nan), st.floats(0)),
    trend=st.floats(-0.03, 0.03),
    counts=st.lists(st.tuples(*[st.integers(0, 2**31)] * 3), min_size=1, max_size=20),
    target=st.integers(1, 2**31),
)
def test_a_threshold_stays_a_float32_whatever_is_counted(
    threshold: float, trend: float, counts: list[tuple[int, int, int]], target: int
) -> None:
    held = Held(threshold, trend)
    for picked, seen, near in counts:
        held = held.after(picked, target, seen, near)
        assert math.isnan(threshold) or 0 <= held.threshold <= torch.finfo(torch.float32).max
        assert abs(held.trend) <= 0.03
        assert math.isnan(threshold) or Held.of(Held.joined([(held.state(), 3), (held.state(), 2**40)])).threshold >= 0


# - empty and small


SHAPES = st.lists(
    st.sampled_from([(0,), (0, 5), (5, 0), (), (1,), (1, 1), (2, 3), (7,)]), min_size=1, max_size=5
)  # fmt: skip


@every_compressor
@fuzzed(10, shapes=SHAPES, size=st.integers(1, 5), wire_dtype=WIRES, seed=SEEDS)
def test_empty_and_one_element_parameters_take_part(
    compressor: ls.Compressor, shapes: list[tuple[int, ...]], size: int, wire_dtype: str, seed: int
) -> None:
    """Also more ranks than elements, and parameters that are all empty."""
    generator = torch.Generator().manual_seed(seed)
    names = tuple(f"p{i}" for i in range(len(shapes)))
    network = SimNetwork(size, WIRE_DTYPES[wire_dtype])
    groups = [Group(0, names, tuple(torch.ones(shape) for shape in shapes)) for _ in range(size)]
    owed = torch.zeros(groups[0].n, dtype=torch.float64)
    given = torch.zeros_like(owed)
    for _ in range(3):
        gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(size)]
        for group, own in zip(groups, gradients, strict=True):
            compressor.accumulate(group, own, size)
            given += torch.cat([g.reshape(-1) for g in own])
        totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
        for group, total, own in zip(groups, totals, gradients, strict=True):
            group.hand_back(total, own, size)
        assert all(torch.equal(a, b) for own in gradients for a, b in zip(own, gradients[0], strict=True))
        owed += size * torch.cat([g.reshape(-1) for g in gradients[0]]).double()
    left = sum(group.unsent.double() for group in groups)
    if not isinstance(compressor, ls.MomentumCorrection):
        assert torch.allclose(owed + left, given, atol=1e-5)


# - 2**31 elements, by arithmetic


@fuzzed(100, capacity=st.integers(1, 2**31), less=st.integers(0, 3), name=st.sampled_from(list(INDEX_FORMATS)))
def test_messages_about_two_to_the_31_elements_have_a_size(capacity: int, less: int, name: str) -> None:
    n = 2**31 - less
    layout = MessageLayout(n, min(capacity, n), INDEX_FORMATS[name], FLOAT32)
    assert layout.nbytes % 8 == 0
    assert layout.nbytes >= 4 * layout.capacity + INDEX_FORMATS[name].nbytes(n, layout.capacity)
    assert 0 < cheapest(n, layout.capacity).cost(n, layout.capacity) < 1e12
    with pytest.raises(ValueError, match="must have at most 2\\*\\*31 elements"):
        MessageLayout(2**31 + 1 + less, 1, INDEX_FORMATS[name])


@fuzzed(
    60,
    name=st.sampled_from(["int32", "block16", "elias_fano"]),
    places=st.sets(st.one_of(st.integers(0, 2**31 - 1), st.integers(2**31 - 70_000, 2**31 - 1)), max_size=40),
    spare=st.integers(0, 30),
    seen=st.integers(0, 2**31 - 1),
)
def test_picks_among_two_to_the_31_elements_survive(name: str, places: set[int], spare: int, seen: int) -> None:
    index = torch.tensor(sorted(places), dtype=torch.int64)
    layout = MessageLayout(2**31, max(1, len(places)) + spare, INDEX_FORMATS[name], FLOAT32)
    message = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    values = torch.arange(len(places), dtype=torch.float32)
    back = layout.unpack(layout.pack(Selection(index, values.clone(), seen, seen), message))
    assert torch.equal(back.index, index)
    assert torch.equal(back.values, values)
    assert (back.seen, back.near) == (seen, seen)


def test_what_is_nearly_picked_is_counted_up_to_all_there_is() -> None:
    """The count is drawn from a part; where that looked nothing like the rest, it was beyond 2**31: a crash."""
    x = torch.zeros(2**19)
    x.view(-1, 2**16)[:, 2**15 :] = 1.0  # what the part leaves out
    x.view(-1, 2**16)[:, 1 : 2**15] = 0.96
    x[0] = 1.0
    found = select(x, 1.0, 100)
    assert (found.seen, found.near) == (2**18 + 1, 2**19)
    layout = MessageLayout(2**31, 100, INDEX_FORMATS["int32"])
    back = layout.unpack(layout.pack(dataclasses.replace(found, seen=2**31), torch.empty(layout.nbytes).byte()))
    assert (back.seen, back.near) == (2**31 - 1, 2**19)


def test_a_threshold_of_nan_is_reached_by_all_but_zeros() -> None:
    assert above(torch.tensor([0.0, 1.0, -0.0, math.nan, 2.0**-149]), math.nan).tolist() == [1, 3, 4]


@fuzzed(
    200,
    n=st.integers(0, 2**40),
    parts=st.integers(1, 64),
    loads=st.lists(st.integers(0, 2**40), min_size=64, max_size=64),
)
def test_parts_of_any_size_cover_it_in_order(n: int, parts: int, loads: list[int]) -> None:
    edges = partition.even(n, parts)
    assert max(partition.widths(edges.tolist())) - min(partition.widths(edges.tolist())) <= 1
    for _ in range(3):
        assert (edges[0], edges[-1], len(edges)) == (0, n, parts + 1)
        assert min(partition.widths(edges.tolist())) >= 0
        edges = partition.balanced(edges, loads[:parts])


@fuzzed(100, elements=st.lists(st.integers(0, LARGE), min_size=1, max_size=12), bucket_bytes=st.integers(1, 2**40))
def test_groups_and_plans_of_any_size_hold_every_element(elements: list[int], bucket_bytes: int) -> None:
    pieces = [Piece(f"layer{i // 2}.p{i}", n) for i, n in enumerate(elements)]
    for fusion in ("layer", "none", ["layer0*", "*"]):
        fused = fuse(pieces, fusion, bucket_bytes)
        assert sorted(piece.name for group in fused for piece in group) == sorted(piece.name for piece in pieces)
    cost = Cost((256, 2**20), (1e-5, 1e-3), (1e-5, 1e-3), (1e-3, 2e-3), 1e-9, 1e-9)
    model = StepModel(tuple(float(i) for i in range(len(pieces))), tuple((n,) for n in elements), (cost,))
    assert model.best()[-1] == len(elements)
    assert model.span(model.best()) >= sum(elements[-1:]) * 1e-9
    assert len(spread(elements, 2)) == len(elements)
    assert traffic("all_reduce", 4 * sum(elements), 2) == 4 * sum(elements)


def test_a_group_of_two_to_the_33_elements_is_laid_out() -> None:
    """On the meta device, where nothing is allocated."""
    parameters = (torch.empty(2**16, 2**17, device="meta"), torch.empty(5, device="meta"))
    group = Group(0, ("a", "b"), parameters)
    group.add(parameters)
    group.hand_back(torch.empty(LARGE + 5, device="meta"), parameters, 3)
    assert group.n == LARGE + 5
    assert [slot.storage_offset() for slot in group.slots(group.unsent)] == [0, LARGE]
    assert count(0.01, group.n) == round(0.01 * group.n)
    assert room(count(1.0, group.n), 1.25) == math.ceil(1.25 * group.n)
    a, b = Sparse(torch.tensor([0, LARGE - 1, LARGE, LARGE + 4]), torch.arange(4.0)).split(group.sizes)
    assert (a.index.tolist(), b.index.tolist()) == ([0, LARGE - 1], [0, 4])


@fuzzed(50, n=st.integers(2**31, LARGE), k=st.integers(1, 1000), seed=SEEDS)
def test_random_picks_and_hashes_reach_beyond_32_bits(n: int, k: int, seed: int) -> None:
    index = scattered(n, k, torch.Generator().manual_seed(seed))
    assert index.numel() == k
    assert (index.diff() > 0).all()
    assert index[0] >= 0
    assert index[-1] < n
    sketch = CountSketch(3, 4 * k, seed)
    runs = list(sketch._runs(2, n - 10 * k, n))
    assert [elements.start for elements, _, _ in runs] == [n - 10 * k, *(elements.stop for elements, _, _ in runs[:-1])]
    assert runs[-1][0].stop == n
    assert all(0 <= buckets.start < buckets.stop <= sketch.columns for _, buckets, _ in runs)


# - memory order


@st.composite
def laid_out(draw: st.DrawFn) -> Tensor:
    """A tensor of zeros that lies in memory in any order, and with gaps perhaps: transposed, say, or channels last."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    memory = torch.zeros([shape[d] * steps[d] for d in order], dtype=dtype)
    x = memory.permute([order.index(d) for d in range(len(shape))])
    return x[tuple(slice(None, None, step) for step in steps)]


@fuzzed(150, x=laid_out(), scale=st.sampled_from([1.0, 0.5, 2.0**-16]), momentum=st.booleans(), seed=SEEDS)
def test_a_gradient_in_any_memory_order_is_added_as_a_contiguous_one(
    x: Tensor, scale: float, momentum: bool, seed: int
) -> None:
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    groups = [Group(0, ("x",), (x,)) for _ in range(2)]
    compressor = ls.MomentumCorrection(0.9, ls.TopK(), clip_norm=0.5) if momentum else ls.TopK()
    for group, gradient in zip(groups, (x, x.contiguous()), strict=True):
        group.memory["velocity"] = torch.ones(group.n)
        compressor.accumulate(group, [gradient], 4, scale)
    assert torch.equal(groups[0].unsent, groups[1].unsent)
    assert momentum or torch.equal(groups[0].unsent, x.reshape(-1).float() * scale)


@fuzzed(150, x=laid_out(), size=st.integers(1, 4), share=st.floats(0, 1), seed=SEEDS)
def test_a_mean_is_written_in_any_memory_order_and_nowhere_else(x: Tensor, size: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(x.numel(), generator=generator) * (torch.rand(x.numel(), generator=generator) < share)
    index = total.nonzero().squeeze(1)
    group = Group(0, ("x",), (x,))
    expected = (total / size).to(x.dtype).view(x.shape)
    memory = x.new_empty(0).set_(x.untyped_storage())  # type: ignore[call-overload]
    for result in (total, Sparse(index, total[index])):
        memory.fill_(7)
        group.hand_back(result, [x], size)
        assert torch.equal(x, expected)
        x.fill_(7)
        assert (memory == 7).all()  # in the gaps nothing was written


class Bucket:
    """As DDP hands it over: the gradients one after the other in a buffer."""

    def __init__(self, parameters: Sequence[Tensor], before: int) -> None:
        self._parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.memory = torch.arange(float(before + sum(sizes) + 3))
        self._buffer = self.memory[before : before + sum(sizes)]

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)


@fuzzed(150, parameters=st.lists(laid_out(), min_size=1, max_size=4), before=st.integers(0, 5))
def test_a_bucket_is_cut_into_gradients_that_lie_as_their_parameters_do(parameters: list[Tensor], before: int) -> None:
    bucket = Bucket(parameters, before)
    pending = PendingBucket(bucket)  # type: ignore[arg-type]
    filled = bucket.memory.clone()
    start = before
    for parameter, gradient in pending.gradients():
        assert gradient.shape == parameter.shape
        if parameter.numel() and parameter.is_contiguous():
            assert gradient.is_contiguous()
        gradient.copy_(torch.ones_like(gradient))
        filled[start : start + parameter.numel()] = 1
        assert torch.equal(bucket.memory, filled)  # its own place, all of it, and no other
        start += parameter.numel()


# - settings

EDGES: list[Any] = [
    0, 1, -1, 2, 3, 2**31, 2**63, -(2**63), 2**64 + 1, 10**400, True, False, None, "", "0.5", "auto", "micro",
    0.0, -0.0, 1.0, 0.5, 1.5, -0.5, 1 - 2**-53, 1 + 2**-52, 5e-324, 1e-300, 1e-40, 1e38, 1e39, 1e308,
    math.nan, math.inf, -math.inf, (), (1,), ("*",), ("*", None), [], {}, b"x", object, torch.tensor(0.5),
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(EDGES), st.floats(), st.floats(0, 1), st.integers(), st.integers(0, 9), st.text(max_size=4)
)
WRAPPERS = {
    "Warmup": {"steps": 1, "compressor": ls.TopK(density=0.2)},
    "DensityLadder": {"steps": 1, "compressor": ls.TopK(density=0.2)},
    "MomentumCorrection": {"momentum": 0.5, "compressor": ls.TopK(density=0.2)},
    "Auto": {},
}
SETTINGS = [
    pytest.param(kind, {}, field.name, id=f"{kind.__name__}-{field.name}")
    for kind in ls.COMPRESSORS.values()
    for field in dataclasses.fields(kind)  # type: ignore[arg-type]
] + [
    pytest.param(getattr(ls, name), others, field.name, id=f"{name}-{field.name}")
    for name, others in WRAPPERS.items()
    for field in dataclasses.fields(getattr(ls, name))
]


def check_named(error: Exception, name: str, value: object) -> None:
    """The error tells which option has which value; of a list, perhaps what in it is wrong."""
    assert name.removesuffix("ies").removesuffix("s") in str(error), error
    assert repr(value) in str(error) or isinstance(value, Sequence), error


@pytest.mark.parametrize(("kind", "others", "name"), SETTINGS)
@fuzzed(40, value=VALUES)
def test_a_setting_works_or_is_refused_by_name(
    kind: type[ls.Compressor], others: dict[str, Any], name: str, value: Any
) -> None:
    try:
        compressor = kind(**{**others, name: value})
    except (ValueError, TypeError) as error:
        check_named(error, name, value)
        return
    given = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0))
    result = simulate(compressor, given, torch.ones(40))
    assert result.mean.isfinite().all()
    if (
        getattr(compressor, "error_feedback", True)
        and getattr(compressor, "exact", True)
        and kind is not ls.MomentumCorrection
    ):
        arrived = 2 * result.mean.double().sum(0) + result.unsent.double().sum(0)
        assert torch.allclose(arrived, given.double().sum((0, 1)), atol=1e-5)


def options_of(function: Callable[..., object], *left_out: str) -> list[str]:
    return [name for name in get_type_hints(function) if name not in (*left_out, "return")]


@pytest.mark.parametrize("name", [*options_of(ls.SparseDDPStrategy.__init__, "ddp_kwargs"), "bucket_cap_mb"])
@fuzzed(60, value=VALUES)
def test_an_option_of_the_strategy_works_or_is_refused_by_name(name: str, value: Any) -> None:
    try:
        strategy = ls.SparseDDPStrategy(**{"fusion": "bucket", name: value})
    except (ValueError, TypeError) as error:
        check_named(error, name, value)
        return
    options = strategy.options
    assert options.bucket_bytes >= 1
    assert options.warmup_steps >= 0
    assert options.local_group == "node" or int(options.local_group) >= 1
    fuse([Piece("a", 10), Piece("b", 20)], options.fusion, options.bucket_bytes)
    compressor = ls.Warmup(options.warmup_steps, options.compressor)
    given = torch.ones(2, 2, 9)
    assert simulate(compressor, given, wire_dtype=options.wire_dtype).mean.isfinite().all()


# - messages


class AlteringNetwork(SimNetwork):
    """Alters one message of bytes or integers at its sender, so that all its receivers get the same."""

    def __init__(self, size: int, wire_dtype: torch.dtype, number: int, how: str, seed: int) -> None:
        super().__init__(size, wire_dtype)
        self._left, self._how = number, how
        self._generator = torch.Generator().manual_seed(seed)
        for comm in self.comms:
            comm._launch = functools.partial(self._launch, comm._launch)  # type: ignore[method-assign]

    def _launch(self, launch: Callable[..., Any], kind: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        message = launch(kind, x, *args, **kwargs)
        if not x.is_floating_point():
            if self._left == 0:
                self._alter(message.given.view(torch.uint8).view(-1))
                message.unchanged = None  # what the sender has is not what it said
            self._left -= 1
        return message

    def _alter(self, message: Tensor) -> None:
        header = message[:16]
        if self._how == "noise":
            message.copy_(torch.randint(0, 256, message.shape, generator=self._generator))
        elif self._how == "header":
            header.copy_(torch.randint(0, 256, header.shape, generator=self._generator))
        elif self._how == "count" and header.numel() % 4 == 0:
            header.view(torch.int32)[0] += int(torch.randint(-3, 4, (), generator=self._generator))
        else:
            at = torch.randint(message.numel(), (2,), generator=self._generator)
            message[at] ^= 1 << int(torch.randint(8, (), generator=self._generator))


def assert_corrupt(error: ValueError) -> None:
    assert isinstance(error, CorruptMessage), error


SPARSE = [
    pytest.param(kind, indices, id=f"{kind.__name__}-{indices}")
    for kind in (ls.TopK, ls.MiCRO, ls.ImportancePruning, ls.OkTopk)
    for indices in INDEX_FORMATS
]


@pytest.mark.parametrize(("kind", "indices"), SPARSE)
@fuzzed(
    20,
    density=st.sampled_from([0.02, 0.1, 0.5]),
    size=st.integers(2, 4),
    n=st.integers(4, 120),
    wire_dtype=WIRES,
    number=st.integers(0, 12),
    how=st.sampled_from(["noise", "header", "count", "bits"]),
    seed=SEEDS,
)
def test_an_altered_message_is_refused_or_stays_in_range(
    kind: Any, indices: str, density: float, size: int, n: int, wire_dtype: str, number: int, how: str, seed: int
) -> None:
    """Also in the steps that follow one that nobody could tell was altered."""
    more = {"repartition_every": 1} if kind is ls.OkTopk else {}
    compressor = kind(density=density, indices=indices, **more)
    network = AlteringNetwork(size, WIRE_DTYPES[wire_dtype], number, how, seed)
    given = torch.randn(4, size, n, generator=torch.Generator().manual_seed(seed))
    groups = [Group(0, ("gradient",), (torch.ones(n),)) for _ in range(size)]
    for gradient in given:
        for group, own in zip(groups, gradient, strict=True):
            compressor.accumulate(group, [own], size)
        try:
            totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
        except ValueError as error:
            assert_corrupt(error)
            return
        for total in totals:
            if isinstance(total, Sparse) and total.index.numel():
                assert (total.index.diff() > 0).all()
                assert 0 <= total.index[0] <= total.index[-1] < n
            assert dense(total, n).shape == (n,)


# - checkpoints


SAVED = [each.name for each in dataclasses.fields(State) if each.metadata]


class Trained:
    """A training in this process, after a few steps, and what it saved."""

    def __init__(self, compressor: ls.Compressor) -> None:
        self.ddp = DistributedDataParallel(small().net)
        self.hook = ls.SparseHook(self.ddp, compressor, fusion="layer")
        for _ in range(3):
            self.step()
        names = [list(group.names) for group in self.hook.exchange.groups]
        plan = {"groups": names, "compressor": repr(compressor), "size": 1}
        self.state = self.hook.state_dict() | {"plan": plan}
        self.state["checksum"] = State(**self.state).checksums()
        self.unsent = unsent(self.hook)

    def step(self) -> None:
        self.ddp(torch.randn(4, 8)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in self.ddp.parameters())
        self.ddp.zero_grad()

    def load(self, state: Any) -> str:
        """What is said, as an error or a warning."""
        for group in self.hook.exchange.groups:
            group.unsent.fill_(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.hook.load_state_dict(state)
            except ValueError as error:
                return str(error)
        return "".join(str(w.message) for w in caught)

    def is_as_saved(self) -> bool:
        now = unsent(self.hook)
        return all(torch.equal(now[name], x) for name, x in self.unsent.items())


TRAININGS = {
    "micro": ls.MiCRO(density=0.05),
    "momentum": ls.MomentumCorrection(0.5, ls.OkTopk(density=0.05)),
    "sketch": ls.SketchFusion(density=0.05, momentum=0.9),
}


@pytest.fixture(scope="module", params=list(TRAININGS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    store = tmp_path_factory.mktemp("store") / request.param
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "_dense_if_alone", lambda compressor, size: compressor)  # so that it has memories to keep
        training = Trained(TRAININGS[request.param])
    yield training
    training.hook.close()
    del training.ddp, training.hook
    dist.destroy_process_group()


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything in a state."""
    if path:
        yield path
    keys = state if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ()
    for key in keys:
        yield from places(state[key], (*path, key))


GARBAGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.sampled_from([[], {}, [[]], {"a": 1}, [0], ["x"], -1, 0, 2, 10**30, torch.zeros(0), torch.ones(2, 2), "mean"]),
)  # fmt: skip


def changed(x: Any, how: str, garbage: Any) -> Any:
    """A tensor of another kind; of anything else ``garbage``."""
    if not isinstance(x, Tensor) or how == "garbage":
        return garbage
    if how == "value":
        flat = x.reshape(-1).clone()
        flat[:1] += 1
        return flat.view(x.shape)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "nan": lambda x: torch.full_like(x, math.nan) if x.is_floating_point() else x - 1,
        "dtype": lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.float32),
        "rows": lambda x: torch.cat([x, x]),
        "fewer rows": lambda x: x[:0],
        "flat": lambda x: x.reshape(-1)[:-1],
        "scalar": lambda x: x.sum(),
        "sparse": lambda x: x.to_sparse(),
        "meta": lambda x: x.to("meta"),
        "more": lambda x: x[..., None].expand(*x.shape, 2),
    }
    return ways[how](x)


HOW = ["garbage", "value", "nan", "dtype", "rows", "fewer rows", "flat", "scalar", "sparse", "meta", "more"]


@fuzzed(
    150,
    data=st.data(),
    what=st.sampled_from(["delete", "rename", "change"]),
    how=st.sampled_from(HOW),
    garbage=GARBAGE,
    vouched=st.booleans(),
    seen=st.integers(1, 2),
)
def test_an_altered_checkpoint_is_refused_or_what_is_not_carried_over_is_named(
    trained: Trained, data: st.DataObject, what: str, how: str, garbage: Any, vouched: bool, seen: int
) -> None:
    state = copy.deepcopy(trained.state)
    for _ in range(seen):
        path = data.draw(st.sampled_from(list(places(state))))
        place = functools.reduce(lambda inside, key: inside[key], path[:-1], state)
        if what == "delete":
            del place[path[-1]]
        elif what == "rename" and isinstance(place, dict):
            place[garbage if isinstance(garbage, str | int) else "other"] = place.pop(path[-1])
        else:
            place[path[-1]] = changed(place[path[-1]], how, copy.deepcopy(garbage))  # never a list within itself
        if not state:
            break
    if not vouched:
        state.pop("checksum", None)
    said = trained.load(state)
    if "are damaged: " in said:
        assert "Resume from an older checkpoint, or without them" in said
        return
    assert said or trained.is_as_saved()
    trained.step()


def test_a_genuine_checkpoint_is_loaded_without_a_word(trained: Trained) -> None:
    assert trained.load(trained.state) == ""
    assert trained.is_as_saved()
    assert set(SAVED) | {"checksum"} == set(trained.state)
    trained.step()


def test_every_way_to_alter_a_checkpoint_by_hand_is_reported(trained: Trained) -> None:
    """One by one, what the fuzzing may take long to find."""
    name = next(iter(trained.unsent))
    for change, expected in (
        ({"size": 0}, "size must be an integer of at least 1; got 0"),
        (
            {"checksum": torch.tensor([])},
            "checksum must be a list of integers, of what all share and of each rank; got a Tensor",
        ),
        ({"size": 2}, "must have a row for each of 2 ranks; got the shape"),
        ({"steps": -1}, "steps must be an integer of at least 0; got -1"),
        ({"residuals": "none"}, "residuals must be 'per_rank' or 'mean'; got 'none'"),
        ({"unsent": {name: torch.full((1, 33, 8), math.nan)}, "groups": []}, "holds values that are not finite"),
        ({"unsent": [1]}, "unsent must be a dictionary of tensors by name; got [1]"),
        ({"groups": [{"names": ["nobody"], "memory": {}}]}, "names must all be in 'unsent'; got ['nobody']"),
        ({"plan": {"groups": [[]]}}, "plan must be a dictionary whose groups are lists of names; got a dict"),
        ({"compressor": None}, "compressor must be a string; got None"),
        ({"steps": 7}, "the checksum of what all ranks share is"),
        (
            {"checksum": [1]},
            "checksum must be a list of integers, of what all share and of each rank; got [1]",
        ),
    ):
        TRIES["test_every_way_to_alter_a_checkpoint_by_hand_is_reported"] += 1
        assert expected in trained.load(trained.state | change)
    for key in SAVED:
        assert f"{key!r} is missing" in trained.load({k: x for k, x in trained.state.items() if k != key})
    without = {key: trained.state[key] for key in SAVED}
    assert "it has no checksum, so " in trained.load(without)
    assert trained.is_as_saved()


def written(trained: Trained) -> bytes:
    file = io.BytesIO()
    torch.save({"state_dict": trained.ddp.module.state_dict(), KEY: trained.state}, file)
    return file.getvalue()


def assert_refused_or_whole(trained: Trained, file: bytes) -> None:
    """PyTorch says that the file is broken, or we say that our part of it is, or it is as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint = torch.load(io.BytesIO(file), weights_only=True)
        except Exception:  # of many kinds, from the unpickler
            return
    state = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    assert trained.load(state) or trained.is_as_saved()


def test_a_file_that_ends_early_is_refused(trained: Trained) -> None:
    whole = written(trained)
    for end in range(0, len(whole), max(1, len(whole) // (ASKED or 100))):
        TRIES["test_a_file_that_ends_early_is_refused"] += 1
        with pytest.raises((RuntimeError, EOFError, ValueError, OSError)):
            torch.load(io.BytesIO(whole[:end]), weights_only=True)


@fuzzed(150, bits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4))
def test_a_file_with_other_bits_is_refused_or_as_it_was(trained: Trained, bits: list[tuple[float, int]]) -> None:
    file = bytearray(written(trained))
    for place, bit in bits:
        file[int(place * len(file))] ^= 1 << bit
    assert_refused_or_whole(trained, bytes(file))


def test_a_file_may_say_that_residuals_require_a_gradient(trained: Trained) -> None:
    unsent = {name: x.clone().requires_grad_() for name, x in trained.state["unsent"].items()}
    assert trained.load(trained.state | {"unsent": unsent}) == ""


def test_a_value_altered_in_the_file_is_reported(trained: Trained) -> None:
    """PyTorch reads it without a word."""
    file = bytearray(written(trained))
    name, x = max(trained.state["unsent"].items(), key=lambda item: item[1].numel())
    at = file.index(x.numpy().tobytes())
    for byte in range(at, at + 4 * x.numel(), 41):
        TRIES["test_a_value_altered_in_the_file_is_reported"] += 1
        altered = bytearray(file)
        altered[byte] ^= 4
        state = torch.load(io.BytesIO(altered), weights_only=True)[KEY]
        if not torch.equal(state["unsent"][name], x):
            assert "are damaged: " in trained.load(state)


@pytest.mark.filterwarnings("ignore:There is one rank")
@pytest.mark.parametrize("name", ["compressor", "fusion", "wire_dtype", "warmup_steps", "bucket_bytes", "residuals"])
@fuzzed(25, value=VALUES)
def test_an_option_of_the_hook_works_or_is_refused_by_name(trained: Trained, name: str, value: Any) -> None:
    try:
        if name == "residuals":
            trained.hook.state_dict(value)
            return
        hook = ls.SparseHook(DistributedDataParallel(nn.Linear(3, 3)), **{name: value})
    except (ValueError, TypeError) as error:
        check_named(error, name, value)
        return
    hook.close()
