"""What to try after steps have been measured: rank 0 plans, and every rank does the same."""

from collections.abc import Mapping, Sequence

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import pieces_of
from lightning_sparse.fusion.model import Plan
from lightning_sparse.fusion.planner import Layout, Measured, best_plan, calibrate, with_small_dense
from lightning_sparse.fusion.rehearsal import Costs, Link, rehearse_all
from lightning_sparse.settings import same

SMALL_BUFFERS = 0.4  # bytes of messages' buffers for each element of the largest group: a tenth of a gradient


def decide(
    exchange: Exchange,
    parameters: Mapping[str, Tensor],
    names: Sequence[str],
    measured: Measured,
    link: Link,
    at_work: Compressor,
    compressor: Compressor,
) -> tuple[Layout, bool] | None:
    """Return what rank 0 decided to try, and whether to try one group after it; None to change nothing.

    To be called on every rank, between two steps.

    Args:
        exchange: that averages.
        parameters: by name, in the order of definition.
        names: the same names in backward order.
        measured: steps as they were.
        link: between the ranks.
        at_work: what averaged when they were measured.
        compressor: what is to average from now on.
    """
    next_at_work = compressor.active(exchange.groups[0].step)
    to_rehearse = [at_work] if same(at_work, next_at_work) else [at_work, next_at_work]
    costs = rehearse_all(exchange, parameters, to_rehearse, link)
    plan: Plan | None = None
    decision = torch.zeros(3 + len(names), dtype=torch.int64, device=exchange.device)
    if exchange.rank == 0:
        try:
            plan, dense_up_to = _plan(exchange, parameters, measured, costs, at_work, compressor)
            group_of = plan.group_of()
            then_one_group = plan.one_group() is not None and _buffers_are_small(exchange)
            decision.copy_(torch.tensor([1, dense_up_to, then_one_group, *(group_of[name] for name in names)]))
        except Exception as error:  # a plan is a gain, not a need; and the others wait for this rank
            rank_zero_warn(f"LayerFusion: no plan could be made; the groups stay as they are. {error!r}")
    decided = exchange.ask(lambda comm: comm.broadcast(decision, 0)).tolist()
    planned, dense_up_to, then_one_group, *group_of_name = decided
    if not planned:
        return None
    groups: list[list[str]] = [[] for _ in range(max(group_of_name) + 1)]
    for name, index in zip(names, group_of_name, strict=True):
        groups[index].append(name)
    return Layout([tuple(names) for names in groups], compressor, dense_up_to, plan), bool(then_one_group)


def _plan(
    exchange: Exchange,
    parameters: Mapping[str, Tensor],
    measured: Measured,
    costs: Sequence[Costs],
    at_work: Compressor,
    compressor: Compressor,
) -> tuple[Plan, int]:
    """Return the best plan, and the elements of the largest group that is summed densely."""
    calibration = calibrate(pieces_of(parameters, at_work), costs[0].kinds, measured)
    kinds, dense_up_to = with_small_dense(costs[-1].kinds, costs[-1].small_dense)
    pieces = pieces_of(parameters, compressor)
    return best_plan(pieces, kinds, measured, calibration, exchange.ways_of_sums), dense_up_to


def _buffers_are_small(exchange: Exchange) -> bool:
    """Whether larger groups would hardly take more memory."""
    held_bytes = max(exchange.on_lanes(lambda lane: lane.comm.buffers.nbytes))
    return held_bytes <= SMALL_BUFFERS * max(2**20, *(group.n for group in exchange.groups))
