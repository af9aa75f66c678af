"""What of a DistributedDataParallel is averaged, and the engine that does it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.gradients import GradientExchange
from lightning_sparse.engine.groups import carry_over, lay_out, lay_out_fragments
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.untrained import untrained_of
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.options import Options
from lightning_sparse.wire import wire_format


def make_exchange(
    ddp: DistributedDataParallel,
    parameters: Mapping[str, Tensor],
    options: Options,
    compressor: Compressor,
    groups: ProcessGroups,
    scaler: torch.amp.GradScaler | None,
) -> Exchange:
    """Return the engine that ``options`` ask for: of gradients, or of local steps.

    Args:
        ddp: that trains.
        parameters: of it, by name.
        options: as the ranks have agreed on them.
        compressor: that averages.
        groups: to send over.
        scaler: what scales the loss, if anything does.
    """
    comms, threaded = groups.comms(wire_format(options.wire_dtype)), not groups.nccl
    if options.local is None:
        return GradientExchange(
            lay_out(parameters, compressor, options.fusion, options.bucket_bytes),
            comms,
            threaded=threaded,
            node=groups if groups.local_size > 1 else None,
            may_be_unused=ddp.find_unused_parameters,
            scaler=scaler,
        )
    ddp.broadcast_buffers = False  # what changes of them is averaged, not sent in every step
    laid_out, fragments = lay_out_fragments(
        parameters, compressor, options.fusion, options.local.parts, options.bucket_bytes
    )
    return LocalExchange(
        laid_out,
        fragments,
        comms,
        threaded=threaded,
        settings=options.local,
        warmup_steps=options.warmup_steps,
        untrained=untrained_of(ddp.module, ddp.parameters_to_ignore),
        compressor=compressor,
    )


def take_over(before: Exchange, after: Exchange, memories: bool) -> None:
    """Have ``after`` go on with what each rank owes in ``before``, for parameters of the same name and shape.

    Both are of gradients or both of local steps; ``memories`` as for ``carry_over``.
    """
    names, averages, steps = {name for group in before.groups for name in group.names}, {}, before.steps
    if isinstance(before, LocalExchange):
        averages = {name: average.clone() for name, average in before.averages.items()}
        for group, own, memory in list(before.rows()):
            group.unsent.copy_(own)
            group.memory = memory
    if isinstance(after, LocalExchange):
        after.adopt([group.names for group in before.groups])
    carry_over(before.groups, list(zip(after.groups, after.compressors, strict=True)), memories)
    if isinstance(after, LocalExchange):
        after.unpack(steps, names, averages, late=False)


def averaged_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that ``ddp`` averages, by name, in the order of definition.

    Raises:
        ValueError: if one of them cannot be averaged.
    """
    for name, child in ddp.module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"{name} must be an embedding with sparse=False; got sparse=True, whose gradient has no dense layout "
                "to send a part of."
            )
    parameters = {
        name.replace("_orig_mod.", ""): parameter  # torch.compile's
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"parameter {name} must be float32, bfloat16 or float16; got {parameter.dtype}. Convert it or freeze "
                "it: gradients are averaged and kept in float32."
            )
        if parameter.device.type == "cuda" and "nccl" not in str(dist.get_backend()):
            raise ValueError(f"on CUDA the process group must be NCCL; got {dist.get_backend()}.")
    return parameters


def check_join(exchange: Exchange, fused: bool, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if a DDP with this engine, ``fused`` by LayerFusion or not, cannot be joined so."""
    if isinstance(exchange, LocalExchange):
        raise ValueError(
            "local_steps cannot be combined with join(): a joined rank takes no steps of its own. Give every rank "
            "as many batches."
        )
    if fused:
        raise ValueError(
            "fusion='layer' cannot be combined with join(): LayerFusion sends messages of its own before a "
            "forward, which a joined rank no longer runs, so the others would wait for it. Give SparseHook "
            "fusion='bucket' or 'none'."
        )
    if not options.get("divide_by_initial_world_size", True):
        raise ValueError(
            "join(divide_by_initial_world_size=False) is not supported: a joined rank still sends what it has not "
            "sent, so a mean is always over all ranks. Leave it out."
        )


def sent_in_vain(exchange: Exchange) -> str:
    """Say that the last step sent as much as dense DDP, if it was one of the compressor proper; else nothing."""
    report = exchange.last
    if report is None or report.saves_bytes():
        return ""
    steps = zip(exchange.compressors, exchange.groups, strict=True)
    compressor = next((c for c, group in steps if c.compresses(group.step - 1)), None)
    if compressor is None:
        return ""
    return (
        f"{compressor} sent {report.sent_bytes:,} bytes in a step, where dense DDP sends {report.dense_bytes:,}: "
        "nothing is saved. Choose settings that send less, such as a lower density or wire_dtype='bfloat16', or train "
        "with strategy='ddp'."
    )
