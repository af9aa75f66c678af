"""How many elements, and which: what two or more compressors share."""


def check_density(compressor: object, density: float) -> None:
    """Raise a ValueError that names the compressor and the value unless ``density`` is in (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(
            f"{type(compressor).__name__}(density={density!r}): density is the fraction of elements sent, "
            "so it must be above 0 and at most 1; 0.01 sends one in a hundred."
        )


def count(density: float, n: int) -> int:
    """k: ``density * n`` rounded, at least 1 and at most n."""
    return min(n, max(1, round(density * n)))
