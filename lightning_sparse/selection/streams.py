"""Random streams shared by all ranks: a function of counters, so that nothing but the step needs saving."""

_MASK = 2**64 - 1


def _mix(x: int) -> int:
    """A bijection of 64-bit integers whose output bits look independent (the finaliser of SplitMix64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw(*counters: int) -> int:
    """An integer in [0, 2**63) that depends on the counters (seed, step, group, ...) and on nothing else."""
    state = 0
    for counter in counters:
        state = _mix((state + counter + 0x9E3779B97F4A7C15) & _MASK)
    return state >> 1
