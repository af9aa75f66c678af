"""The engine of a hook, and another in its place where ``sparse_auto`` changes between gradients and local steps."""

import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.auto.policy import Candidate
from lightning_sparse.checkpoint.rank_local import in_order, set_tensors, tensors_everywhere
from lightning_sparse.checks import class_names
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.wrappers import without_format
from lightning_sparse.engine.build import Way, check_not_capturing, make_exchange
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import BUCKET_BYTES, NOT_TRAINED, apart, make_groups, pieces_of, some
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.optimizers import Optimizers
from lightning_sparse.engine.step import PendingBucket
from lightning_sparse.fusion.layer_fusion import LayerFusion
from lightning_sparse.fusion.steps import Times
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.costs import Link
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.settings import same

SURE = 10  # Steps after which an optimizer that has not stepped is not expected any more, where none was given.


class Switch:
    """The engine in use.

    Args:
        ddp: that trains.
        parameters: of it, by name.
        way: how the first engine averages.
        groups: to send over.
        scaler: what scales the loss, if anything does.
        ranks: for messages of the main thread, between two steps.

    Attributes:
        exchange: the engine in use.
        way: how it averages.
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
        way: Way,
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
        #: What optimizers have, by name.
        self._held = {name: held.get(p, p) for name, p in parameters.items()}
        self.optimizers = Optimizers(self._held.values(), lambda: me.exchange if (me := own()) else None)
        self._numbers: Mapping[str, int] = {}  # of the optimizer of each parameter, by name
        self._known: list[list[int]] = []  # parameters in each group of each optimizer, when these were found
        self._said_untrained = self._said_lbfgs = False
        self._noted: list[weakref.ref[Optimizer]] = []  # on every rank
        size = ranks.size // groups.local_size if way.elastic is None else sys.maxsize  # hosts that may come
        compressor = _dense_if_alone(way.compressor, size)
        self._first = replace(way, compressor=compressor)
        self._make(self._first)

    def _make(self, way: Way) -> None:
        ddp = self._ddp()
        assert ddp is not None
        ddp.broadcast_buffers = self._broadcasts_buffers and way.local is None  # the engine sends them then
        self.way = way
        means = self._groups, self._scaler, self._broadcasts_buffers
        self.exchange: Exchange = make_exchange(ddp, self.parameters, way, *means)
        self.layer_fusion: LayerFusion | None = None
        if way.fusion == "layer" and way.local is None:
            among_formats = way.may_sum_in_place
            self.layer_fusion = LayerFusion(self.exchange, way.compressor, self.parameters, among_formats)
        self._names = [group.names for group in self.exchange.groups]
        self._group()
        for noted in self._noted:
            if (optimizer := noted()) is not None:
                self.exchange.note(optimizer)

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
            numbers = self.optimizers.numbers(self._held) or saved or {}
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
        if self.way.local is not None:
            return
        if self.layer_fusion is not None:
            self.layer_fusion.group_by(self._numbers)
            return
        pieces = pieces_of(self.parameters, self.way.compressor, self._numbers)
        self.exchange.regroup(make_groups(self.parameters, self.way.compressor, apart(self._names, pieces)))

    def _warn_of_lbfgs(self) -> None:
        """Warn once where LBFGS steps with means that are not those of this step's gradients."""
        exchange = self.exchange
        if self._said_lbfgs or self.way.local is not None or exchange.size == 1:
            return
        if not all(isinstance(c, Dense) for c in exchange.compressors) and "LBFGS" in class_names(self.optimizers.seen):
            self._said_lbfgs = True
            rank_zero_warn(
                "LBFGS may end far above the loss of ddp where gradients are compressed: it was 916 % with int4 and "
                "61 % with micro in a small language model. Give strategy='ddp', 'sparse_dense' in float32, or another "
                "optimizer."
            )

    def _say_what_is_untrained(self) -> None:
        untrained = [name for name, number in self._numbers.items() if number == NOT_TRAINED]
        is_sure = bool(self._noted) or self.exchange.steps >= SURE
        if untrained and is_sure and not self._said_untrained and self.way.local is None and self.exchange.size > 1:
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
            self.exchange.note(optimizer)

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook."""
        check_not_capturing()
        if bucket.is_last() and torch._C._current_graph_task_id() >= 0:  # else there is no backward: ddp.join()
            at_end, handed_back = Variable._execution_engine.queue_callback, self.exchange.handed_back
            at_end(lambda: at_end(handed_back))  # once DDP has set .grad
        return self.exchange.hook(state, bucket)

    def hand_over(self, bucket: PendingBucket) -> Future[Tensor]:
        """Have gradients averaged that do not come from DDP."""
        check_not_capturing()
        return self.exchange.hand_over(bucket)

    def close(self) -> bool:
        """End the engine; returns whether no message is under way."""
        self.optimizers.close()
        return self.exchange.close()

    # - changes, on every rank between two steps

    def to_gradients(self) -> None:
        """Average gradients as at first; with local steps from the mean of all weights and optimizer states."""
        if self.way.local is not None:
            self.exchange.merge()
            for optimizer in in_order(self.optimizers.seen, list(self.parameters.values())):
                tensors = tensors_everywhere(optimizer, self._ranks, self.exchange.device)
                averaged = {key: x for key, x in tensors.items() if x.is_floating_point() and x.dtype != torch.float64}
                set_tensors(optimizer, self._means(averaged) | self._of_first_rank(tensors.keys() - averaged, tensors))
        self._change(self._first)
        self.chosen = None

    def to_local_steps(self, chosen: Candidate) -> None:
        """Take the local steps of ``chosen``, without a message: what each rank has not sent goes along."""
        before, was = self.exchange, self.chosen
        way = replace(self._first, compressor=chosen.averaging, local=LocalSteps(chosen.local_steps), warmup_steps=0)
        are_local = self.way.local is not None
        if are_local:
            before.show_average()  # from which the new engine starts
        self._change(way)
        if are_local:
            memories = was is not None and same(was.averaging, chosen.averaging)
            self.exchange.take_over(before, memories=memories)
        elif self.may_add_unsent:
            self.exchange.add_to_next(before.groups)
        self.chosen = chosen

    def _change(self, way: Way) -> None:
        before = self.exchange
        before.close()
        self._make(way)
        self.exchange.go_on_from(before)

    def _of_first_rank(self, keys: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``keys`` as rank 0 has them: counters."""
        own = {key: tensors[key].to(self.exchange.device) for key in sorted(keys) if tensors[key].numel()}
        return {key: self._ranks.all_gather(x.reshape(-1)).wait()[0].view(x.shape) for key, x in own.items()}

    def _means(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of each over the ranks, many in a message."""
        if not any(x.numel() for x in tensors.values()):
            return dict(tensors)
        total = torch.cat([x.to(self.exchange.device, torch.float32).reshape(-1) for x in tensors.values()])
        for part in total.split(BUCKET_BYTES // 4):
            self._ranks.all_reduce(part).wait()
        means = total.div_(self._ranks.size).split([x.numel() for x in tensors.values()])
        return {key: mean.view(x.shape).to(x) for (key, x), mean in zip(tensors.items(), means, strict=True)}


def _dense_if_alone(compressor: Compressor, size: int) -> Compressor:
    """``compressor``, or among ``size`` = 1 ranks, or nodes, its dense form: there is nobody to send to."""
    if size > 1:
        return compressor
    if not isinstance(named := without_format(compressor), Dense):
        rank_zero_warn(
            f"There is one rank, node or replica, and nobody to send to: {named} is not used, and every step "
            "updates all elements. Start more, or use strategy='auto'."
        )
    return compressor.dense_variant()
