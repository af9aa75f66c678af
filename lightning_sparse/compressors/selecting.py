"""What compressors that select elements have in common: checks, and what the messages of a step tell the next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.checks import check_density, check_slack
from lightning_sparse.compressors.group import Group
from lightning_sparse.selection.threshold import ThresholdController
from lightning_sparse.wire import CAUSE, CorruptMessage, Selection, check_index_format


def check_selecting(compressor: object) -> None:
    """Raise a ValueError unless ``density``, ``slack`` and ``indices`` of ``compressor``, where it has them, can be."""
    check_density(compressor, getattr(compressor, "density", 1.0))
    check_slack(compressor, getattr(compressor, "slack", 1.0))
    check_index_format(compressor, getattr(compressor, "indices", "auto"))


def report(compressor: object, group: Group, messages: Sequence[Selection]) -> None:
    """Send the headers of a step's messages to the host, for :func:`last_report` in the next step.

    Raises:
        CorruptMessage: if a message of the step before arrived damaged, and nobody has asked since.
    """
    last_report(compressor, group)
    headers = [count for each in messages for count in (each.count, each.seen, each.near, each.load, each.intact)]
    on_device = isinstance(headers[0], Tensor)
    group.send_to_host("report", (torch.stack(headers) if on_device else torch.tensor(headers)).view(-1, 5))


def last_report(compressor: object, group: Group) -> list[list[int]] | None:
    """Return the headers of all messages of the last step, if any were reported; and forget them.

    Returns:
        For each message how many elements were selected, ``seen``, ``near``, ``load``, and 1, which says it was intact.

    Raises:
        CorruptMessage: if one was not.
    """
    reported = group.take_from_host("report")
    if reported is None:
        return None
    rows: list[list[int]] = reported.tolist()
    damaged = sum(not intact for *_, intact in rows)
    if damaged:
        raise CorruptMessage(
            f"{type(compressor).__name__}: the selected elements in {damaged} of {len(rows)} messages of the step "
            f"before arrived damaged: {CAUSE}"
        )
    return rows


def carry_thresholds(parts: Sequence[tuple[Group, int]], *keys: str) -> dict[str, Tensor]:
    """The thresholds kept under ``keys``, each the mean over the groups that have it; see :meth:`Compressor.carry`."""
    known = {key: [(group.memory[key], n) for group, n in parts if n and key in group.memory] for key in keys}
    return {key: ThresholdController.joined(states) for key, states in known.items() if states}
