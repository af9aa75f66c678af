"""What the summary of a training advises: settings that its strategy has, and that can still be changed so."""

from dataclasses import fields
from typing import Any

from lightning_sparse.auto.policy import Auto
from lightning_sparse.compressors import Dense, MomentumCorrection
from lightning_sparse.compressors.wrapper import Wrapper

# A setting of compressors: what sends less, and the value at which nothing is less.
LESS = {"density": ("a lower density", 0), "skip": ("a higher skip", 1), "rank": ("a lower rank", 1)}
SHORTEST = ("sign", "int2")  # formats on the wire
KEEP = "Keep these settings"
LESS_OFTEN = "Averager less often, with larger batches or accumulate_grad_batches"
LESS_WORK = "Compress with less work, as 'sparse_dense' with wire_dtype='int4' does"
NO_FORMAT = "Compress with less work, as wire_dtype='float32' does"
#: For a strategy that chooses by itself: where the network is no bottleneck, where it is, and where compressing is.
OF_ITSELF = {"send more": KEEP, "send less": LESS_OFTEN, "compress less": LESS_OFTEN}


def advice(options: Any, is_sharded: bool) -> dict[str, str]:
    """What to do with a strategy of these ``options``, by what is to be better; as ``OF_ITSELF`` has it."""
    inner, may_be_local = options.compressor, not is_sharded and options.local_group == 1
    if isinstance(inner, Auto):
        return OF_ITSELF
    while isinstance(inner, Wrapper):
        may_be_local &= not isinstance(inner, MomentumCorrection)
        inner = inner.compressor
    sends_all = isinstance(inner, Dense) and options.wire_dtype == "float32"
    return {
        "send more": KEEP if sends_all and not options.local else f"{KEEP}, or send more for the sake of the loss",
        "send less": _send_less(options, inner, may_be_local),
        "compress less": LESS_WORK if not isinstance(inner, Dense) else LESS_OFTEN if sends_all else NO_FORMAT,
    }


def _send_less(options: Any, inner: object, may_be_local: bool) -> str:
    settings = {field.name: getattr(inner, field.name) for field in fields(inner)}  # type: ignore[arg-type]
    ways = [text for name, (text, least) in LESS.items() if settings.get(name, least) != least]
    if options.wire_dtype == "float32" or not (settings.keys() & LESS or options.wire_dtype in SHORTEST):
        ways.append("a shorter wire_dtype")
    if may_be_local:
        ways.append("more local_steps" if options.local else "local_steps")
    less = f"Send less ({', '.join(ways)})" if ways else LESS_OFTEN
    return less if options.hosts else f"{less}, or let 'sparse_auto' choose"  # which is not elastic
