"""What is measured of a training: torchmetrics, log keys, and notes in bounded memory with what to advise by them."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sparse.auto.policy import Auto
from lightning_sparse.compressors import Dense, MomentumCorrection
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import Wrapper
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.bucket import Report
from lightning_sparse.engine.observers import Waiting, delivered
from lightning_sparse.engine.timeline import GroupTime


class CompressionRatio(Metric):
    """Bytes a float32 ring all-reduce would have sent over bytes sent, over all updates and ranks.

    >>> metric = CompressionRatio()
    >>> metric.update(dense_bytes=400, sent_bytes=100)
    >>> metric.compute()
    tensor(4., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    dense_bytes: Tensor
    sent_bytes: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("dense_bytes", torch.tensor(0.0, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
        self.add_state("sent_bytes", torch.tensor(0.0, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")

    def update(self, dense_bytes: float, sent_bytes: float) -> None:
        self.dense_bytes += dense_bytes
        self.sent_bytes += sent_bytes

    def compute(self) -> Tensor:
        """The ratio; 1 where a single rank sends nothing either way."""
        return compression_ratio(self.dense_bytes, self.sent_bytes)


class ThresholdError(Metric):
    """Mean over updates of |picked - k| / k: how far a step's number of picked elements is from the number meant.

    >>> metric = ThresholdError()
    >>> metric.update(picked=90, target=100)
    >>> metric.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.int64, device="cpu"), dist_reduce_fx="sum")

    def update(self, picked: float | Tensor, target: float) -> None:
        """Add a step that picked ``picked`` elements where ``target`` = k were meant."""
        self.total += threshold_error(picked, target)
        self.count += 1

    def compute(self) -> Tensor:
        """The mean error; 0 before the first update."""
        return self.total / self.count.clamp(min=1)


def compression_ratio(dense_bytes: float | Tensor, sent_bytes: float | Tensor) -> Tensor:
    """``dense_bytes / sent_bytes`` as a 0-d float64 tensor; 1 where both are zero."""
    dense, sent = _float64(dense_bytes), _float64(sent_bytes)
    return torch.where((dense == 0) & (sent == 0), torch.ones_like(dense), dense / sent)


def threshold_error(picked: float | Tensor, target: float) -> Tensor:
    """``|picked - target| / target`` as a 0-d float64 tensor; 0 where nothing was meant and nothing was picked."""
    difference = (_float64(picked) - target).abs()
    return difference / max(target, 1)


def _float64(x: float | Tensor) -> Tensor:
    """``x`` as it is, where it is: a number on the CPU."""
    return torch.as_tensor(x, dtype=torch.float64, device=x.device if isinstance(x, Tensor) else "cpu")


# A setting of compressors: what sends less, and the value at which nothing is less.
LESS = {"density": ("a lower density", 0), "skip": ("a higher skip", 1), "rank": ("a lower rank", 1)}
SHORTEST = ("sign", "int2")  # formats on the wire
KEEP = "Keep these settings"
LESS_OFTEN = "Use larger batches or accumulate_grad_batches, to exchange less often"
LESS_WORK = "Compress with less work, as 'sparse_dense' with wire_dtype='int4' does"
NO_FORMAT = "Compress with less work, as wire_dtype='float32' does"
#: For a strategy that chooses by itself: where the network is no bottleneck; where it is, and also where gradients wait
#: too long already; and where compressing is.
OF_ITSELF = {"send more": KEEP, "send less": LESS_OFTEN, "send no sparser": LESS_OFTEN, "compress less": LESS_OFTEN}


def advice(options: Any) -> dict[str, str]:
    """What to do with a strategy of these ``options``, by what is to be better; as ``OF_ITSELF`` has it."""
    inner, may_be_local = options.compressor, True
    if isinstance(inner, Auto):
        return OF_ITSELF
    while isinstance(inner, Wrapper):
        may_be_local &= not isinstance(inner, MomentumCorrection)
        inner = inner.compressor
    sends_all = isinstance(inner, Dense) and options.wire_dtype == "float32"
    return {
        "send more": KEEP if sends_all and not options.local else f"{KEEP}, or send more for the sake of the loss",
        "send less": _send_less(options, inner, may_be_local),
        "send no sparser": _send_less(options, inner, may_be_local, LESS.keys() - {"density"}),
        "compress less": LESS_WORK if not isinstance(inner, Dense) else LESS_OFTEN if sends_all else NO_FORMAT,
    }


def _send_less(options: Any, inner: object, may_be_local: bool, by: Collection[str] = LESS.keys()) -> str:
    settings = {field.name: getattr(inner, field.name) for field in fields(inner)}  # type: ignore[arg-type]
    ways = [text for name, (text, least) in LESS.items() if name in by and settings.get(name, least) != least]
    if options.wire_dtype == "float32" or not (settings.keys() & LESS or options.wire_dtype in SHORTEST):
        ways.append("a shorter wire_dtype")
    if may_be_local:
        ways.append("more local_steps" if options.local else "local_steps")
    less = f"Send less ({', '.join(ways)})" if ways else LESS_OFTEN
    return less if options.hosts else f"{less}, or let 'sparse_auto' choose"  # which is not elastic


MOST_POINTS = 2000  # of a training; of more, every other one is kept
MOST_STEPS = 200  # of which times are kept since there is a plan


@dataclass
class Sums:
    """Sums over steps of this rank.  A step is a gradient averaged."""

    steps: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    ms_compress: float = 0.0
    ms_network: float = 0.0
    ms_wait: float = 0.0
    ms_step: float = 0.0  # from the end of the batch before to the end of the batch, data loading included

    def add(self, report: Report) -> None:
        self.steps += 1
        for name in ("sent_bytes", "dense_bytes", "ms_compress", "ms_network", "ms_wait"):
            setattr(self, name, getattr(self, name) + getattr(report, name))


class Point(NamedTuple):
    """One logged step of this rank."""

    step: int
    seconds: float  # since training began
    sent_bytes: int  # since training began
    loss: float  # of this rank's batch; NaN if it is not known
    threshold_error: float
    unsent_norm: float
    ms_wait: float


@dataclass
class Selected:
    """Elements of one group that were updated, over logged steps."""

    name: str
    elements: int
    picked: float = 0.0
    target: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, group: Group) -> "Selected":
        """Return those of the last step; named after the modules of the first and the last parameter."""
        modules = [name.rpartition(".")[0] or name for name in group.names] or [""]
        name = modules[0] if len(set(modules)) == 1 else f"{modules[0]} … {modules[-1]}"
        return cls(name, group.n, float(group.picked), group.target, steps=1)


@dataclass
class Notes:
    """Notes of a training on this rank."""

    sums: Sums = field(default_factory=Sums)  # over all steps
    #: The first and the last logged step, and steps evenly spaced between them; at most ``MOST_POINTS``.
    points: list[Point] = field(default_factory=list)
    stride: int = 1  # logged steps from one point to the next
    logged: int = 0  # the number of logged steps
    selects: bool = False  # a group updated fewer than all of its elements, as was meant
    groups: list[Selected] = field(default_factory=list)  # as they are sent, since there are these groups
    times: list[GroupTime] = field(default_factory=list)  # of the same groups in the last logged step with known times
    waiting: list[Waiting] = field(default_factory=list)  # what was unsent of each parameter after the last logged step
    expected_step_s: float | None = None  # seconds of a step by LayerFusion's plan; None without one
    expected_span_s: float | None = None  # the part of it from the start of backward to the last mean
    planned_s: list[float] = field(default_factory=list)  # seconds of the last steps that followed the plan
    dense: str = "dense DDP"  # what sends all, of the strategy's kind
    advice: dict[str, str] = field(default_factory=lambda: OF_ITSELF)  # for this strategy
    members: str = "ranks"  # what more of there must be where there is nobody to send to
    is_undecided: bool = False  # sparse_auto has chosen nothing
    cuda: bool = False  # steps ran on a GPU, of which the host's clock knows little

    def note(self, point: Point) -> None:
        """Add the last logged step; drop every other one when there are too many."""
        if (self.logged - 1) % self.stride:  # the step before was kept only as the last
            self.points.pop()
        self.points.append(point)
        self.logged += 1
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self.stride *= 2

    def note_groups(self, selected: Sequence[Selected]) -> None:
        """Add a logged step; begin anew where the groups are others."""
        self.selects |= any(0 < each.target < each.elements for each in selected)
        before, now = ([(each.name, each.elements) for each in groups] for groups in (self.groups, selected))
        if now != before:
            self.groups = [Selected(group.name, group.elements) for group in selected]
            self.times = []
        for group, new in zip(self.groups, selected, strict=True):
            group.picked += new.picked
            group.target += new.target
            group.steps += new.steps

    def note_planned(self, seconds: float) -> None:
        self.planned_s = [*self.planned_s, seconds][-MOST_STEPS:]

    def ms_wait(self) -> float:
        """Return the mean over steps; on CUDA over logged steps, whose times come from the device."""
        if self.cuda and self.points:
            return fmean(point.ms_wait for point in self.points)
        return self.sums.ms_wait / max(self.sums.steps, 1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Notes":
        kept = json.loads(text)
        return cls(
            **kept
            | {
                "sums": Sums(**kept["sums"]),
                "points": [Point(*point) for point in kept["points"]],
                "groups": [Selected(**selected) for selected in kept["groups"]],
                "times": [GroupTime(**time) for time in kept["times"]],
                "waiting": [Waiting(**waiting) for waiting in kept["waiting"]],
            }
        )


#: Log keys -> what they were called up to 0.2.0, which is logged too, for a release.
EARLIER = {
    "sparse/residual_norm": "sparse/unsent_norm",
    "sparse/residual_over_gradient": "sparse/unsent_over_gradient",
    "sparse/staleness": "sparse/age",
}


def with_earlier_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics``, those that had another name also by that."""
    found = dict(metrics)
    for key, value in metrics.items():
        for now, before in EARLIER.items():
            if key == now or key.startswith(f"{now}/"):
                found[key.replace(now, before)] = value
    return found


def measure(averager: Averager, waiting: Sequence[Waiting]) -> dict[str, float]:
    """Return the log keys of the last step, after which ``waiting`` waited, between two steps on every rank.

    Where a member has several ranks, each knows of its slices alone: what counts is summed over them.  Waits for the
    device.
    """
    report, sample = averager.last, averager.sample
    assert report is not None
    assert sample is not None
    of_slice = (report.picked, report.elements, report.target, report.mask_bytes, report.overflow, report.sent_bytes)
    own = [*map(float, of_slice), averager.unsent_norm() ** 2, *sample.waits_and_arrives()]
    picked, elements, target, mask_bytes, overflow, sent_bytes, square, waits, arrives = _over_slices(averager, own)
    return {
        "sparse/sent_bytes": float(report.sent_bytes),
        **({"sparse/member_bytes": sent_bytes} if averager.cut.count > 1 else {}),
        "sparse/compression_ratio": float(compression_ratio(report.dense_bytes, report.sent_bytes)),
        "sparse/density": picked / max(elements, 1),
        "sparse/threshold_error": float(threshold_error(picked, target)),
        "sparse/mask_bytes": mask_bytes,
        "sparse/overflow": overflow,
        "sparse/residual_norm": math.sqrt(square),
        "sparse/oldest_steps": float(max((each.oldest for each in waiting), default=0)),
        "sparse/residual_over_gradient": max((each.unsent_over_gradient for each in waiting), default=0.0),
        "sparse/delivered": delivered_by(averager),
        "sparse/staleness": waits / arrives if arrives else 0.0,
        "sparse/ms_compress": report.ms_compress,
        "sparse/ms_wait": _ms_wait(averager, report),
        **averager.metrics(),
    }


def measure_parts(averager: Averager, waiting: Sequence[Waiting]) -> dict[str, float]:
    """Return the log keys of each group and each parameter in the last step; waits for the device."""
    metrics = {}
    for group in averager.groups:
        metrics[f"sparse/density/{group.index}"] = float(group.picked) / max(group.n, 1)
        metrics[f"sparse/threshold_error/{group.index}"] = float(threshold_error(group.picked, group.target))
        metrics[f"sparse/overflow/{group.index}"] = float(group.overflow)
    for each in waiting:
        metrics[f"sparse/oldest_steps/{each.name}"] = float(each.oldest)
        metrics[f"sparse/residual_over_gradient/{each.name}"] = each.unsent_over_gradient
    return metrics


def delivered_by(averager: Averager) -> float:
    """The part of what was unsent on all ranks that the last step delivered, as a squared norm of a sample.

    To be called on every rank between two steps, while there is a sample.
    """
    assert averager.sample is not None
    sums = averager.sample.unsent_and_left(lambda group, places: averager.unsent_of(group)[places])
    sums = averager.lanes.sum_over_members(sums)
    return delivered(*_over_slices(averager, sums.square().sum(1).tolist()))


def _over_slices(averager: Averager, numbers: Sequence[float]) -> list[float]:
    """``numbers`` of this rank's slices, summed over all slices; to be called on every rank, between two steps."""
    if averager.cut.count == 1:
        return list(numbers)
    own = torch.tensor(numbers, dtype=torch.float64, device=averager.device)
    total: list[float] = averager.lanes.sum_over_slices(own).tolist()
    return total


def _ms_wait(averager: Averager, report: Report) -> float:
    """Milliseconds from the last gradient to the last mean."""
    if averager.device.type == "cpu":
        return report.ms_wait
    timeline = averager.timeline  # the host only launches: the device knows
    arrivals = [timeline.arrival_s(parameter) for group in averager.groups for parameter in group.parameters]
    return 1e3 * (timeline.span_s() - max((s for s in arrivals if math.isfinite(s)), default=math.nan))
