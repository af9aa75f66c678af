"""The averager in use, and another in its place where ``sparse_auto`` changes between gradients and local steps."""

import re
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.auto.policy import Candidate
from lightning_sparse.checkpoint.rank_local import in_order, set_tensors, tensors_everywhere
from lightning_sparse.checks import uncompiled
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.elastic.averager import ElasticAverager
from lightning_sparse.elastic.membership import LAYERS
from lightning_sparse.engine.averager import Averager, lanes_of
from lightning_sparse.engine.bucket import PendingBucket
from lightning_sparse.engine.ddp_checks import check_not_capturing
from lightning_sparse.engine.groups import (
    BUCKET_BYTES,
    NOT_TRAINED,
    apart,
    lay_out,
    lay_out_fragments,
    make_groups,
    pieces_of,
    some,
)
from lightning_sparse.fusion.layer_fusion import LayerFusion
from lightning_sparse.fusion.steps import Times
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.local_steps.buffers import ModuleBuffers
from lightning_sparse.local_steps.optimizers import Optimizers, need_full_sums
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.local_steps.untrained import untrained_of
from lightning_sparse.network.agreement import described, versions
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.costs import Link
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.settings import as_text, same

SURE = 10  # Steps after which an optimizer that has not stepped is not expected any more, where none was given.


@dataclass(frozen=True)
class AveragingConfig:
    """How gradients or weights are averaged."""

    compressor: Compressor
    fusion: str | Sequence[str]  # which parameters share a group at first, as ``engine.groups.fuse`` takes it
    warmup_steps: int = 0  # dense steps first
    bucket_bytes: int = BUCKET_BYTES  # of float32 gradient in a group
    local: LocalSteps | None = None  # None where gradients are averaged
    elastic: Elastic | None = None  # with local steps, where the hosts of an elastic training meet
    may_sum_in_place: bool = False  # sums may depend on DDP's buckets, which a checkpoint does not keep


class ActiveAverager:
    """The averager in use.

    Args:
        ddp: that trains.
        parameters: of it, by name.
        config: how the first averager averages.
        groups: to send over.
        scaler: what scales the loss, if anything does.
        ranks: for messages of the main thread, between two steps.

    Attributes:
        averager: the one in use.
        config: how it averages.
        layer_fusion: of its groups, if there is one.
        chosen: the candidate in use, where one was chosen.
        usual: what its step took when it was chosen, if that is known.
        link: as it was measured then, if it was.
        may_add_unsent: every step takes all gradients, so that what is unsent may be added to a rank's own next ones.
        knows_link: sums of local steps that were given go by the link's latencies.
        optimizers: of these parameters.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        parameters: Mapping[str, Tensor],
        config: AveragingConfig,
        groups: ProcessGroups,
        scaler: torch.amp.GradScaler | None,
        ranks: Comm,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._groups, self._scaler, self._ranks = groups, scaler, ranks
        self._broadcasts_buffers = ddp.broadcast_buffers
        self.parameters = parameters
        self.chosen: Candidate | None = None
        self.usual: Times | None = None
        self.link: Link | None = None
        self.knows_link = False
        self.may_add_unsent = scaler is None and not ddp.find_unused_parameters
        held, own = getattr(ddp, "held", {}), weakref.ref(self)
        #: What optimizers have, by name: of sharded models not the shards.
        self.held = {name: held.get(p, p) for name, p in parameters.items()}
        self.optimizers = Optimizers(self.held.values(), lambda: active.averager if (active := own()) else None)
        self._numbers: Mapping[str, int] = {}  # of the optimizer of each parameter, by name
        self._known: list[list[int]] = []  # parameters in each group of each optimizer, when these were found
        self._said_untrained = self._said_lbfgs = False
        self._noted: list[weakref.ref[Optimizer]] = []  # on every rank
        size = groups.members.size if config.elastic is None else sys.maxsize  # hosts that may come
        self._first = _dense_if_alone(config, size, is_sharded=hasattr(ddp, "sharded"))
        self._make(self._first)

    def _make(self, config: AveragingConfig) -> None:
        ddp = self._ddp()
        assert ddp is not None
        averager_sends = config.local is not None and config.elastic is None  # of other hosts DDP knows nothing
        ddp.broadcast_buffers = self._broadcasts_buffers and not averager_sends
        self.config = config
        _normalise_over(self._groups, ddp, config.local is not None)
        means = self._groups, self._scaler, self._broadcasts_buffers
        self.averager: Averager = make_averager(ddp, self.parameters, config, *means)
        self.layer_fusion: LayerFusion | None = None
        if config.fusion == "layer" and config.local is None:
            self.layer_fusion = LayerFusion(
                self.gradients, config.compressor, self.parameters, among_formats=config.may_sum_in_place
            )
        self._names = [group.names for group in self.averager.groups]
        self._group()
        for noted in self._noted:
            if (optimizer := noted()) is not None:
                self.averager.note(optimizer)

    def group_as(self, names: Sequence[Sequence[str]]) -> None:
        """Average in groups of these ``names``, apart where :func:`apart` says so."""
        self._names = [tuple(each) for each in names]
        self._group()

    def group_by_optimizer(self, saved: Mapping[str, int] | None = None) -> None:
        """Have no group of gradients with parameters of several optimizers, and average exactly what none trains.

        ``saved`` are the numbers of optimizers in a checkpoint, to go by while none is known.
        """
        known = [[id(each), *(len(group["params"]) for group in each.param_groups)] for each in self.optimizers.seen]
        if known != self._known or (saved and not known):
            self._known = known
            numbers = self.optimizers.numbers(self.held) or saved or {}
            if numbers != self._numbers:
                self._numbers = numbers
                self._group()
        self._say_what_is_untrained()
        self._warn_of_lbfgs()

    @property
    def numbers(self) -> Mapping[str, int]:
        """Of the optimizer of each parameter, by name; empty where all have the same."""
        return self._numbers if len(set(self._numbers.values())) > 1 else {}

    def _group(self) -> None:
        if self.config.local is not None:
            return
        if self.layer_fusion is not None:
            self.layer_fusion.group_by(self._numbers)
            return
        pieces = pieces_of(self.parameters, self.config.compressor, self._numbers)
        groups = apart(self._names, pieces)
        self.averager.regroup(make_groups(self.parameters, self.config.compressor, groups, self.averager.cut))

    def _warn_of_lbfgs(self) -> None:
        averager = self.averager
        if self._said_lbfgs or self.config.local is not None or averager.size == 1:
            return
        is_exact = all(isinstance(c, Dense) for c in averager.compressors)
        if not is_exact and need_full_sums(self.optimizers.seen):
            self._said_lbfgs = True
            rank_zero_warn(
                "LBFGS may end far above the loss of ddp where gradients are compressed: it was 916 % with int4 and "
                "61 % with micro in a small language model. Give strategy='ddp', 'sparse_dense' in float32, or another "
                "optimizer."
            )

    def _say_what_is_untrained(self) -> None:
        untrained = [name for name, number in self._numbers.items() if number == NOT_TRAINED]
        is_sure = bool(self._noted) or self.averager.steps >= SURE
        if untrained and is_sure and not self._said_untrained and self.config.local is None and self.averager.size > 1:
            self._said_untrained = True
            elements = sum(self.parameters[name].numel() for name in untrained)
            rank_zero_warn(
                f"{some(untrained)} require a gradient and belong to no optimizer. While gradients are averaged, "
                f"theirs are in float32 in every step, as under ddp ({4 * elements / 2**20:,.1f} MiB). Where nobody "
                "reads them, call requires_grad_(False) before the fit, which saves that."
            )

    def note(self, *optimizers: Optimizer) -> None:
        """Know of ``optimizers`` of these parameters before they step; to be called on every rank."""
        for optimizer in filter(self.optimizers.are_of, optimizers):
            self.optimizers.note(optimizer)
            self._noted.append(weakref.ref(optimizer))
            self.averager.note(optimizer)

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook."""
        check_not_capturing()
        if bucket.is_last() and torch._C._current_graph_task_id() >= 0:  # else there is no backward: ddp.join()
            at_end, handed_back = Variable._execution_engine.queue_callback, self.averager.handed_back
            at_end(lambda: at_end(handed_back))  # twice: DDP sets .grad in a callback of its own, between the two
        return self.averager.hook(state, bucket)

    def hand_over(self, bucket: PendingBucket) -> Future[Tensor]:
        """Have gradients averaged that do not come from DDP."""
        check_not_capturing()
        return self.gradients.hand_over(bucket)

    @property
    def gradients(self) -> GradientAverager:
        """The averager in use, where gradients are averaged."""
        assert isinstance(self.averager, GradientAverager)
        return self.averager

    def close(self) -> bool:
        """End the averager; returns whether no message is under way."""
        self.optimizers.close()
        return self.averager.close()

    # - changes, on every rank between two steps

    def to_full_sums(self) -> None:
        """Sum gradients in full and in float32 from now on; what is unsent goes with the first."""
        self._first = replace(self._first, compressor=Dense())
        self.to_gradients()

    def to_gradients(self) -> None:
        """Average gradients as at first; with local steps from the mean of all weights and optimizer states."""
        if (local := self.averager.local) is not None:
            local.merge()
            for optimizer in in_order(self.optimizers.seen, list(self.held.values())):
                tensors = tensors_everywhere(optimizer, self._ranks, self.averager.device)
                averaged = {key: x for key, x in tensors.items() if x.is_floating_point() and x.dtype != torch.float64}
                set_tensors(optimizer, self._means(averaged) | self._of_first_rank(tensors.keys() - averaged, tensors))
        self._change(self._first)
        self.chosen = None

    def to_local_steps(self, chosen: Candidate) -> None:
        """Take the local steps of ``chosen``, without a message: what each rank has not sent goes along."""
        before, was = self.averager, self.chosen
        config = replace(self._first, compressor=chosen.averaging, local=LocalSteps(chosen.local_steps), warmup_steps=0)
        are_local = self.config.local is not None
        if are_local:
            before.show_average()  # from which the new averager starts
        self._change(config)
        if are_local:
            memories = was is not None and same(was.averaging, chosen.averaging)
            self.averager.take_over(before, memories=memories)
        elif self.may_add_unsent and self.averager.local is not None:
            self.averager.local.add_to_next(before.groups)
        self.chosen = chosen

    def _change(self, config: AveragingConfig) -> None:
        before = self.averager
        before.close()
        self._make(config)
        self.averager.go_on_from(before)

    def _of_first_rank(self, keys: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``keys`` as rank 0 has them: counters."""
        own = {key: tensors[key].to(self.averager.device) for key in sorted(keys) if tensors[key].numel()}
        return {key: self._ranks.all_gather(x.reshape(-1)).wait()[0].view(x.shape) for key, x in own.items()}

    def _means(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of each over the ranks, many in a message."""
        if not any(x.numel() for x in tensors.values()):
            return dict(tensors)
        total = torch.cat([x.to(self.averager.device, torch.float32).reshape(-1) for x in tensors.values()])
        for part in total.split(BUCKET_BYTES // 4):
            self._ranks.all_reduce(part).wait()
        means = total.div_(self._ranks.size).split([x.numel() for x in tensors.values()])
        return {key: mean.view(x.shape).to(x) for (key, x), mean in zip(tensors.items(), means, strict=True)}


def _dense_if_alone(config: AveragingConfig, size: int, is_sharded: bool) -> AveragingConfig:
    """``config``, or among ``size`` = 1 members, of which one has nobody to send to, dense sums of gradients.

    A model that is sharded for local steps takes them all the same.
    """
    if size > 1:
        return config
    local = config.local if is_sharded else None
    alone = replace(config, compressor=config.compressor.dense_variant(), local=local)
    if not same(config.compressor, alone.compressor) or config.local is not local:
        rank_zero_warn(
            "There is one rank, node or replica, and nobody to send to: every step updates all elements, as under ddp, "
            "whatever the compressor and local_steps. Start more, or use Lightning's strategy='auto'."
        )
    return alone


# - what an averager is made of


def make_averager(
    ddp: DistributedDataParallel,
    parameters: Mapping[str, Tensor],
    config: AveragingConfig,
    groups: ProcessGroups,
    scaler: torch.amp.GradScaler | None,
    broadcasts_buffers: bool = True,
) -> Averager:
    """Return what averages so: gradients, or with local steps what optimizers did.

    ``broadcasts_buffers``: ranks share buffers, as ``ddp`` was made.
    """
    if config.local is not None:
        return _local_steps(ddp, parameters, config, config.local, groups, broadcasts_buffers)
    return GradientAverager(
        lay_out(parameters, config.compressor, config.fusion, config.bucket_bytes, groups.cut),
        groups.comms(beside_ddp=False),
        threaded=not groups.nccl,
        may_be_unused=ddp.find_unused_parameters,
        scaler=scaler,
        may_sum_in_place=config.may_sum_in_place,
        held=getattr(ddp, "held", None),
    )


def _local_steps(
    ddp: DistributedDataParallel,
    parameters: Mapping[str, Tensor],
    config: AveragingConfig,
    local: LocalSteps,
    groups: ProcessGroups,
    broadcasts_buffers: bool,
) -> Averager:
    settings = local.with_lead(config.compressor)
    parameters = getattr(ddp, "sharded", parameters)  # whose shards are found anew
    laid_out, fragments = lay_out_fragments(
        parameters, config.compressor, config.fusion, local.parts, config.bucket_bytes, groups.cut
    )
    ignored = {uncompiled(name) for name in ddp.parameters_to_ignore}
    untrained = untrained_of(ddp.module, ignored | parameters.keys(), getattr(ddp, "frozen", None))
    if config.elastic is not None:
        return ElasticAverager(
            laid_out,
            fragments,
            settings=settings,
            warmup_steps=config.warmup_steps,
            untrained=untrained,
            buffers=ModuleBuffers(ddp.module, shared=False),
            hosts=config.elastic,
            host=groups,
            described=_described(ddp.module, config, config.elastic, groups.local_size),
            lead_is_given=local.lead is not None,
        )
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    inside = groups.between.inside
    return LocalAverager(
        laid_out,
        fragments,
        lanes_of(laid_out, groups.comms(beside_ddp=True), not groups.nccl),
        settings=settings,
        warmup_steps=config.warmup_steps,
        untrained=untrained,
        compressor=config.compressor,
        lead_is_given=local.lead is not None,
        buffers=ModuleBuffers(ddp.module, ignored, broadcasts_buffers, device),
        inside=inside,
        make_ready=getattr(ddp, "reshard", lambda: None),
    )


def _normalise_over(groups: ProcessGroups, ddp: DistributedDataParallel, is_local: bool) -> None:
    """Have SyncBatchNorm go over all ranks, or with local steps those of a member, so that no forward waits for others.

    One with a process group that a user has given keeps it.
    """
    norms = [each for each in ddp.module.modules() if isinstance(each, nn.SyncBatchNorm)]
    inside: dist.ProcessGroup | None = getattr(ddp, "inside", None)  # of a sharded model
    if inside is None and norms and (ranks := groups.between.inside) is not None:
        inside = ranks.group
    for norm in norms if inside is not None else ():
        if norm.process_group in (None, inside):
            norm.process_group = inside if is_local else None


def _described(module: nn.Module, config: AveragingConfig, hosts: Elastic, devices: int) -> dict[str, str]:
    """What must be the same on all hosts of an elastic training, as text by name."""
    same = versions() | described(module) | {name: value for name, value in vars(config).items() if name != "elastic"}
    same |= {"own_pace": hosts.own_pace, "devices": devices}
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(module))  # addresses, of functions say
    return {name: as_text(value) for name, value in same.items()} | {LAYERS: layers}
