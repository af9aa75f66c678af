"""The engine of a hook, and another in its place where ``sparse_auto`` changes between gradients and local steps."""

import math
import sys
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.checkpoint.optimizers import in_order, set_tensors, tensors_everywhere
from lightning_sparse.compressors import Auto, Candidate, Compressor
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import BUCKET_BYTES
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.optimizers import Optimizers, why_not_alone
from lightning_sparse.engine.phases import Phase
from lightning_sparse.engine.sample import Sample
from lightning_sparse.exchanges import make_exchange, take_over
from lightning_sparse.fusion.chooser import Chooser
from lightning_sparse.fusion.layer_fusion import CHANGED, LONGEST_WINDOW, LayerFusion
from lightning_sparse.fusion.rehearsal import NoClock, measure_link, median_over_ranks
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.options import Options
from lightning_sparse.settings import same

MEASURED_AFTER = 3  # local steps that were given
SETTLING = 3  # local steps until any is timed
PAUSE = 5  # a step that takes so many times as long as the median is one with a pause in it
WINDOW = 10  # local steps whose mean is what a step takes: on each rank they differ, as fragments do


class Engines:
    """The engine that averages gradients, and while local steps are chosen the one that averages weights.

    Args:
        ddp: that trains.
        parameters: of it, by name.
        options: as the ranks have agreed on them.
        groups: to send over.
        scaler: what scales the loss, if anything does.
        ranks: for messages of the main thread, between two steps.
        may_be_local: whether local steps may be chosen: only where somebody shows their average.

    Attributes:
        exchange: the engine in use.
        compressor: what averages gradients, or chooses what does.
        layer_fusion: of its groups, if there is one.
        chooser: with ``sparse_auto``.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        parameters: Mapping[str, Tensor],
        options: Options,
        groups: ProcessGroups,
        scaler: torch.amp.GradScaler | None,
        ranks: Comm,
        may_be_local: bool,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._parameters, self._options = parameters, options
        self.compressor = compressor = dense_if_alone(options.averaging, ranks.size // groups.local_size)
        self._groups, self._scaler, self._ranks = groups, scaler, ranks
        self._broadcasts_buffers = ddp.broadcast_buffers
        auto = compressor.active(sys.maxsize)
        local = may_be_local and options.local_group == 1
        self.chooser = Chooser(auto, parameters, local) if isinstance(auto, Auto) else None
        self._chosen: Candidate | None = None  # whose local steps are taken
        self._pace: Pace | None = None  # of them
        own = weakref.ref(self)
        watched = options.local is not None or (self.chooser is not None and local)
        #: of these parameters, where local steps are taken or may be
        self.optimizers = Optimizers(
            parameters.values() if watched else (), lambda: me.exchange if (me := own()) else None
        )
        self._knows_link = False
        self.exchange, self.layer_fusion = self._make(options, compressor)

    @property
    def parameters(self) -> list[Tensor]:
        """Those that are averaged, in the order of definition."""
        return list(self._parameters.values())

    def _make(self, options: Options, compressor: Compressor) -> tuple[Exchange, LayerFusion | None]:
        ddp = self._ddp()
        assert ddp is not None
        ddp.broadcast_buffers = self._broadcasts_buffers
        exchange = make_exchange(ddp, self._parameters, options, compressor, self._groups, self._scaler)
        exchange.may_sum_in_place = self.chooser is not None
        if options.fusion != "layer" or options.local:
            return exchange, None
        return exchange, LayerFusion(exchange, compressor, self._parameters, self.chooser)

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook."""
        return self.exchange.hook(state, bucket)

    def between_steps(self) -> None:
        """Do what is due before a forward that trains: send, measure, change groups or the engine."""
        self.optimizers.unscale()
        if self._pace is not None and isinstance(self.exchange, LocalExchange) and not self.exchange.is_half_made:
            self.exchange.settle()
            self._watch(self.exchange, self._pace)
        self.exchange.between_steps()
        if self.chooser and any(map(why_not_alone, self.optimizers.seen)):
            self.chooser.forbid_local_steps()
        if self._options.local and self._options.fusion == "layer" and self.exchange.steps == MEASURED_AFTER:
            self._measure_link()
        if self.layer_fusion is not None:
            self.layer_fusion.between_steps()
            chosen = self.layer_fusion.chosen
            if chosen is not None and chosen.local_steps and self.exchange.ask_for_unsent():
                self._begin_local_steps(chosen)
                self.exchange.between_steps()

    def _measure_link(self) -> None:
        """Have sums of local steps go by the link's latencies too; LayerFusion measures them for gradients."""
        if self.exchange.size > 1 and not self._knows_link:
            self._knows_link = True
            with suppress(NoClock):
                measure_link(self.exchange)

    def close(self) -> bool:
        """End the engine; returns whether no message is under way."""
        self.optimizers.close()
        return self.exchange.close()

    # - checkpoints

    def state(self) -> dict[str, Any]:
        """What was planned or chosen, for :meth:`resume`."""
        if self._chosen is not None:
            return {"chosen": str(self._chosen), "latencies": list(self.exchange.latencies)}
        if self._knows_link:
            return {"latencies": list(self.exchange.latencies)}
        return self.layer_fusion.state() if self.layer_fusion else {}

    def resume(self, state: Mapping[str, Any], steps: int) -> None:
        """Go on as what returned ``state`` after so many ``steps``, if it was chosen from the same candidates."""
        chosen = self.chooser.candidate(state.get("chosen", "")) if self.chooser else None
        if chosen is not None and chosen.local_steps:
            self._begin_local_steps(chosen)
        if isinstance(self.exchange, LocalExchange) and (self._options.local or chosen is not None):
            self._knows_link = "latencies" in state
            self.exchange.set_latencies(*state.get("latencies", self.exchange.latencies))
            return
        if self._chosen is not None:
            self._change(self._options, self.compressor)
        if self.layer_fusion is not None:
            self.layer_fusion.resume(state, steps)

    def follow(self, before: "Engines") -> None:
        """Take local steps as ``before`` did at last, if they were chosen from the same candidates."""
        if before._chosen is not None:
            self.resume(before.state(), before.exchange.steps)

    # - changes

    def _change(self, options: Options, compressor: Compressor) -> None:
        """Put another engine in the place of this one, which owes nothing."""
        before = self.exchange
        before.close()
        self.exchange, self.layer_fusion = self._make(options, compressor)
        self.exchange.count_from(before.steps)
        self.exchange.set_latencies(*before.latencies)
        if before.sample is not None:
            self.exchange.sample = Sample(self.exchange.groups)
        self._chosen = self._pace = None

    def _begin_local_steps(self, chosen: Candidate) -> None:
        options = replace(self._options, compressor=chosen.averaging, local_steps=chosen.local_steps, warmup_steps=0)
        self._change(options, chosen.averaging)
        self._chosen, self._pace = chosen, Pace()

    def _watch(self, exchange: LocalExchange, pace: "Pace") -> None:
        """Choose again once it is known how long local steps take, and when that has changed."""
        known, changed = pace.usual_s, pace.has_changed(exchange)
        if changed:
            self._end_local_steps()
        elif pace.usual_s != known and self.chooser and self.chooser.chosen and self.chooser.measured:
            again = self.chooser.note(exchange, pace.usual_s)
            if again == self._chosen:
                return
            if again.local_steps:
                self._change_local_steps(again)
            else:
                self._end_local_steps()
                assert self.layer_fusion is not None
                self.layer_fusion.go_on_with(again, self.chooser.measured)

    def _change_local_steps(self, chosen: Candidate) -> None:
        """Take others from now on, without a message: what each rank owes goes along."""
        before, was = self.exchange, self._chosen
        assert isinstance(before, LocalExchange)
        assert was is not None
        before.show_average()  # from which the new engine starts
        self._begin_local_steps(chosen)
        take_over(before, self.exchange, memories=same(was.averaging, chosen.averaging))

    def _end_local_steps(self) -> None:
        """Have all ranks hold the mean of their weights, and of their optimizers' states; then average gradients."""
        assert isinstance(self.exchange, LocalExchange)
        self.exchange.merge()
        for optimizer in in_order(self.optimizers.seen, self.parameters):
            tensors = tensors_everywhere(optimizer, self._ranks, self.exchange.device)
            averaged = {key: x for key, x in tensors.items() if x.is_floating_point() and x.dtype != torch.float64}
            set_tensors(optimizer, self._means(averaged) | self._of_first_rank(tensors.keys() - averaged, tensors))
        self._change(self._options, self.compressor)

    def _of_first_rank(self, keys: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``keys`` as rank 0 has them: counters, and lengths of lists."""
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


def dense_if_alone(compressor: Compressor, size: int) -> Compressor:
    """``compressor``, or among ``size`` = 1 ranks, or nodes, its dense form: there is nobody to send to."""
    if size > 1:
        return compressor
    if compressor.compresses(sys.maxsize):
        rank_zero_warn(
            f"There is one rank, or with local_group one node, and nobody to send to: {compressor} is not used, and "
            "every step updates all elements. A compressor starts to work from two on."
        )
    return compressor.dense_variant()


class Pace:
    """How long local steps take, and whether that has changed.

    Attributes:
        usual_s: seconds that they took at first; 0 until known.
    """

    def __init__(self) -> None:
        self.usual_s = 0.0
        self._seconds: list[float] = []
        self._window = WINDOW
        self._last_s = time.perf_counter()
        self._seen: int | None = None

    def has_changed(self, exchange: LocalExchange) -> bool:
        """Whether steps take much longer or shorter than at first; to be asked between two steps.

        One before which somebody evaluated or saved does not count.
        """
        if exchange.steps == self._seen:  # gradients are being accumulated
            return False
        self._seen, before_s, self._last_s = exchange.steps, self._last_s, time.perf_counter()
        self._seconds.append(math.nan if exchange.phase is Phase.SHOWN else self._last_s - before_s)
        if len(self._seconds) < SETTLING + self._window:
            return False
        known = [s for s in self._seconds[SETTLING:] if math.isfinite(s)] or [math.nan]
        self._seconds, longest_s = [], PAUSE * median(known)
        now_s = float(median_over_ranks(exchange, [mean(s for s in known if not s > longest_s)])[0])
        if not self.usual_s:
            self.usual_s = now_s if math.isfinite(now_s) else 0.0
            return False
        self._window = min(2 * self._window, LONGEST_WINDOW)
        changed = abs(math.log(now_s / self.usual_s)) > math.log(CHANGED)  # False for NaN
        if changed:
            rank_zero_info(
                f"sparse_auto: local steps take {1e3 * now_s:.0f} ms, no longer {1e3 * self.usual_s:.0f} ms; choosing "
                "anew."
            )
        return changed
