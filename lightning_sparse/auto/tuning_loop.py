"""What is due between two steps of a training: measuring, planning, choosing, and changing the averager."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.auto.active_averager import ActiveAverager, AveragingConfig
from lightning_sparse.auto.between_steps import choose_and_watch, measure_link_once, nothing
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.auto.policy import START, Auto
from lightning_sparse.checks import is_list, is_number
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.fusion.layer_fusion import is_worth_planning
from lightning_sparse.fusion.steps import BetweenSteps, Times
from lightning_sparse.local_steps.optimizers import need_full_sums, why_not_alone
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.costs import Link
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.settings import same

IN_FLOAT32 = "lightning_sparse: sparse_auto sums gradients in float32, as ddp does"
NONE_SEEN = -1  # In the place of the number of steps that were seen: before the first step there is a pass too.


class TuningLoop:
    """What is due between two steps of a training, as a generator that is resumed once in each of them.

    The generator never refers to this object: a cycle would keep all that is unsent until garbage is collected.

    Args:
        active: the averager in use, and the way to another.
        chooser: with ``sparse_auto``.
        warmup_steps: in which nothing is chosen.
    """

    def __init__(self, active: ActiveAverager, chooser: Chooser | None, warmup_steps: int = 0) -> None:
        self.active, self.chooser = active, chooser
        self._warmup_steps = warmup_steps
        self._seen = active.averager.steps
        self._at_work: Compressor | None = None  # in the last pass
        self._is_choosing = self._may_precede = False
        self._passes: BetweenSteps[None]
        self._begin()

    def between_steps(self) -> None:
        """Do what is due before a forward that trains: send, measure, change groups or the averager."""
        active = self.active
        local = active.averager.local
        if local is None or not local.is_half_made:
            active.averager.settle()
            if self.chooser and need_full_sums(active.optimizers.seen):
                self._sum_in_full()
            active.group_by_optimizer()
            if active.averager.steps != self._seen:  # else gradients are being accumulated
                self._seen = active.averager.steps
                self._pass()
                active.averager.end_pass()
        active.averager.between_steps()

    def _pass(self) -> None:
        for optimizer in self.active.optimizers.seen if self.chooser else ():
            if self.chooser and (reason := why_not_alone(optimizer)):
                self.chooser.forbid_local_steps(f"{type(optimizer).__name__}, which {reason}")
        if self._is_choosing != self._is_to_choose or not same(self._at_work, self._at_work_now):
            self._start()  # a warm-up has ended
            return
        next(self._passes)
        self._at_work = self._at_work_now

    def _sum_in_full(self) -> None:
        """Choose nothing any more, and sum as ddp does."""
        self.chooser = None
        self.active.to_full_sums()
        self._start()
        rank_zero_info(f"{IN_FLOAT32}: with other sums LBFGS may end at another loss.")

    @property
    def _at_work_now(self) -> Compressor | None:
        return self.active.layer_fusion.at_work if self.active.layer_fusion else None

    @property
    def _is_to_choose(self) -> bool:
        if self.chooser is None:  # then nobody looks at the groups, which may have to be waited for
            return False
        return self.active.chosen is not None or self.active.averager.group_step >= self._warmup_steps

    def expect_step(self) -> None:
        """Note that every rank begins a step now: to choose, there is a pass before the first one.

        Where nobody says so, as a rank may run a forward alone, the first pass is after the first step.
        """
        if self._may_precede:
            self._may_precede, self._seen = False, NONE_SEEN

    def _begin(self, planned: bool = False) -> None:
        """Begin as :meth:`_start` does, before any step."""
        self._start(planned)
        self._may_precede = self._is_choosing and not planned

    def _start(self, planned: bool = False) -> None:
        """Begin: measure, or if there is a plan already, only watch."""
        active, fusion = self.active, self.active.layer_fusion
        if fusion is not None:
            fusion.averager.defer(False)
            fusion.averager.take_record()
        self._seen = active.averager.steps
        self._at_work, self._is_choosing = self._at_work_now, self._is_to_choose
        if fusion is not None and not fusion.is_worthwhile:
            self._passes = nothing()
        elif self.chooser is not None and self._is_choosing:
            self._passes = choose_and_watch(active, self.chooser, planned)
        elif fusion is not None:
            self._passes = fusion.course(planned)
        else:
            self._passes = measure_link_once(active) if active.config.fusion == "layer" else nothing()
        next(self._passes)

    def check_join(self, options: Mapping[str, Any]) -> None:
        """Raise a ValueError if ranks cannot have uneven inputs, with these ``options`` of DDP's ``join``."""
        self.active.averager.check_join(options)
        if self.active.layer_fusion is not None:
            raise ValueError(
                "fusion='layer' cannot be combined with join(): LayerFusion sends messages of its own before a "
                "forward, which a joined rank no longer runs, so the others would wait for it. Give SparseHook "
                "fusion='bucket' or 'none'."
            )

    # - checkpoints

    def state(self) -> dict[str, Any]:
        """What was planned or chosen, for :meth:`resume`."""
        active = self.active
        state: dict[str, Any] = {"optimizers": dict(active.numbers)} if active.numbers else {}
        if habits := active.averager.habits:
            state["habits"] = habits
        link = [active.link.latency_s, active.link.s_per_byte] if active.link else []
        usual = {"usual": [*(float(each) for each in active.usual), *link]} if active.usual else {}
        if active.layer_fusion is not None:
            plan = active.layer_fusion.state()
            return state | plan | {"chosen": str(active.chosen or "")} | usual if plan else state
        if active.chosen:
            state |= {"chosen": str(active.chosen)} | usual
        if active.chosen or active.knows_link:
            state["latencies"] = list(active.averager.lanes.latencies)
        return state

    def resume(self, state: Mapping[str, Any], steps: int) -> None:
        """Go on as what returned ``state`` after so many ``steps``, if it was chosen from the same candidates."""
        active = self.active
        chosen = self.chooser.candidate(state.get("chosen", "")) if self.chooser else None
        if chosen is not None and chosen.local_steps:
            active.to_local_steps(chosen)
        elif active.chosen is not None and active.chosen.local_steps:
            active.to_gradients()
        active.group_by_optimizer(state.get("optimizers"))
        planned, averager, fusion = chosen is not None, active.averager, active.layer_fusion
        averager.resume_habits(state.get("habits", {}))
        if fusion is None:
            active.knows_link = "latencies" in state
            averager.lanes.set_latencies(*state.get("latencies", averager.lanes.latencies))
        else:
            planned = fusion.resume(state, chosen.averaging if chosen else fusion.compressor, steps)
            active.chosen = chosen if planned else None
        usual: Any = state.get("usual")
        is_usual = planned and is_list(usual) and len(usual) in (4, 6) and all(map(is_number, usual))
        active.usual = Times(usual[0], usual[1], bool(usual[2]), usual[3]) if is_usual else None
        active.link = Link(*usual[4:]) if is_usual and usual[4:] else None
        self._begin(planned)

    def follow(self, before: "TuningLoop") -> None:
        """Take local steps as ``before`` did at last, if they were chosen from the same candidates."""
        if before.active.chosen is not None and before.active.chosen.local_steps:
            self.resume(before.state(), before.active.averager.steps)


def tuning_loop_of(
    ddp: DistributedDataParallel,
    parameters: Mapping[str, Tensor],
    config: AveragingConfig,
    policy: Auto | None,
    groups: ProcessGroups,
    scaler: torch.amp.GradScaler | None,
    ranks: Comm,
    may_choose_local: bool,
) -> TuningLoop:
    """Return the tuning loop of a training of ``ddp``; arguments as of :class:`ActiveAverager`.

    ``policy`` is what chooses, if anything does, among local steps too if it ``may_choose_local``: only where somebody
    shows their average.
    """
    alone = groups.members.size == 1  # with nobody to send to
    if policy is not None and policy.start == START and not alone and not is_worth_planning(parameters):
        config = replace(config, compressor=Dense())
        rank_zero_info(f"{IN_FLOAT32}: so few parameters are sent at once.")
    active = ActiveAverager(ddp, parameters, config, groups, scaler, ranks)
    chooser = None if policy is None or alone else Chooser(policy, may_choose_local)
    if chooser:
        gc.collect()  # of all that was imported: choosing would set it off, on one rank after the other, 0.3 s each
    return TuningLoop(active, chooser, config.warmup_steps)
