"""How much later ``sparse_auto`` is than the best candidate of hindsight, in simulated trainings with a clock.

    python docs/benchmarks/regret.py --worlds 2000

A world is a model, a link, ranks, and what nobody knows beforehand: how far a step is from its forecast, how noisy
steps are, whether the link changes, and how many steps a task needs.  The policy is the one that runs in trainings; it
is asked for a candidate and notes what a step took, and what choosing costs passes on the world's clock.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from statistics import fmean

from lightning_sparse.auto import trials
from lightning_sparse.auto.between_steps import CHOOSING, GLIMPSE_OF_DEVICE, WATCHED
from lightning_sparse.auto.chooser import EXACT, STATES, soonest
from lightning_sparse.auto.forecast import Forecast, loss_above
from lightning_sparse.auto.policy import CANDIDATES, Auto, Candidate
from lightning_sparse.auto.trials import SETTLING, TAKING_OVER, Trials
from lightning_sparse.fusion.steps import LEAST_ROUNDS, PAUSE, Times
from lightning_sparse.local_steps.second_moments import EARLY

# Bytes of a value on the wire, and what its coding takes beside int4's.
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.02, "int4": 0.52, "int2": 0.27, "sign": 0.14}
CODING = {"float32": 0.0, "bfloat16": 0.2, "int8": 0.8, "int4": 1.0, "int2": 1.0, "sign": 1.0}
# What a step of a candidate delivers, and after how many steps a gradient arrives: as in stored trainings.
DELIVERED = {"float32": 1.0, "bfloat16": 1.0, "int8": 1.0, "int4": 0.97, "int2": 0.4, "sign": 0.1}
LATE = {"int4": 0.85, "int2": 1.7, "sign": 3.0}  # for each local step
FEW, MANY = 2**18, 2**22  # bytes that are sent to measure a link
LEAST_STEPS = 500  # of a training
NAMES = {str(each): each for each in CANDIDATES}
INT4, BFLOAT16, USUAL = (NAMES[each] for each in ("dense, int4", "dense, bfloat16", "2 local steps, dense, int4"))


@dataclass(frozen=True)
class Physics:
    """What a step is made of, in seconds: as it is, or as it was measured."""

    members: int
    elements: int
    computing_s: float
    byte_s: float  # that a member sends
    hop_s: float  # of a message
    coding_s: float  # of a value, to int4 and back
    applying_s: float  # of a weight, after local steps
    hidden: float  # part of computing beside which sums travel
    shares_cores: bool  # what sends takes of what computes

    def sends(self, candidate: Candidate) -> float:
        """Bytes of a member in a step."""
        values = self.elements / max(candidate.local_steps, 1)
        return 2 * (self.members - 1) / self.members * values * BYTES[str(candidate.wire_dtype)]

    def messages_s(self, candidate: Candidate) -> float:
        """In which messages of a step are under way."""
        return self.sends(candidate) * self.byte_s + 2 * self.hop_s

    def coding(self, candidate: Candidate) -> float:
        """Seconds of a step's coding."""
        values = self.elements / max(candidate.local_steps, 1)
        return CODING[str(candidate.wire_dtype)] * self.coding_s * values

    def step_s(self, candidate: Candidate) -> float:
        """Seconds of a step."""
        coding_s, messages_s = self.coding(candidate), self.messages_s(candidate)
        work_s = self.computing_s + self.shares_cores * coding_s
        if candidate.local_steps:
            applying_s = self.applying_s * self.elements / candidate.local_steps
            return max(work_s + applying_s, messages_s + coding_s)
        last_s = messages_s / 10 + 2 * self.hop_s  # of the last layers, which nothing hides
        return work_s + max(messages_s + coding_s - self.hidden * self.computing_s, last_s)


@dataclass(frozen=True)
class World:
    """A training to be had, and what will happen in it."""

    seed: int
    actual: Physics
    ranks: int
    on_device: bool
    compiling_s: float  # of each new candidate but float32
    looking_s: float  # that predicting all candidates takes
    noise: float  # of a step's logarithm
    pauses: float  # part of steps that take several times as long
    changes_s: float  # when the link changes; infinite: never
    factor: float  # by which a byte then takes longer
    off: dict[Candidate, float]  # factor of a step that no model knows
    tasks: dict[Candidate, float]  # factor of the steps needed that nobody expects
    dense_steps: float  # that dense training needs to the loss

    @classmethod
    def drawn(cls, seed: int) -> "World":
        """Draw the world of this number."""
        r = Random(seed)
        members, local = round(2 ** r.uniform(1, 6)), r.choice((1, 2, 4, 8))
        elements, on_device = round(10 ** r.uniform(5.5, 8.2)), r.random() < 0.4
        shares_cores = not on_device and r.random() < 0.6
        coding_s = 10 ** (r.uniform(-10, -9.3) if on_device else r.uniform(-8.7, -8)) * r.uniform(1, 1 + shares_cores)
        actual = Physics(
            members,
            elements,
            computing_s=min(max(elements * 10 ** r.uniform(-8.9, -7.1), 0.005), 1.0),
            byte_s=8 / 10 ** r.uniform(8, 10.4),
            hop_s=r.choice((10 ** r.uniform(-4, -2.7), 10 ** r.uniform(-4, -2.7), r.uniform(0.0, 0.08))),
            coding_s=coding_s / (1 if shares_cores else local),
            applying_s=coding_s * r.uniform(0.2, 0.6) / (1 if shares_cores else local),
            hidden=r.uniform(0.4, 0.8),
            shares_cores=shares_cores,
        )
        of_task = r.gauss(0, 0.09)  # of its local steps, beside their forecast in stored trainings
        tasks = {c: math.exp(of_task + r.gauss(0, 0.05)) if c.local_steps else 1.0 for c in CANDIDATES}
        tasks[INT4] = math.exp(r.gauss(0, 0.02))
        world = cls(
            seed,
            actual,
            ranks=members,
            on_device=on_device,
            compiling_s=10 ** r.uniform(-0.7, 0.5) if on_device and r.random() < 0.5 else 0.0,
            looking_s=10 ** r.uniform(-1.3, -0.5),
            noise=10 ** r.uniform(-1.7, -0.7),
            pauses=r.choice((0.0, 0.01, 0.02)),
            changes_s=math.inf,
            factor=1.0,
            off={c: math.exp(r.gauss(0, 0.05)) for c in CANDIDATES},
            tasks=tasks,
            dense_steps=1.0,
        )
        least_s = min(world.step_s(c) * world.more_steps(c) for c in world.allowed)
        lasts_s = max(120 * 30 ** r.random(), LEAST_STEPS * least_s)
        world = replace(world, dense_steps=lasts_s / least_s)
        if r.random() < 0.25:
            world = replace(world, changes_s=r.uniform(0.1, 0.9) * lasts_s, factor=8 ** r.uniform(-1, 1))
        return world

    def physics(self, now_s: float) -> Physics:
        """What holds at that time."""
        actual = self.actual
        return actual if now_s < self.changes_s else replace(actual, byte_s=actual.byte_s * self.factor)

    def step_s(self, candidate: Candidate, now_s: float = 0.0) -> float:
        """Seconds of a step then, in the mean."""
        return self.physics(now_s).step_s(candidate) * self.off[candidate]

    def expected(self, candidate: Candidate, step_s: float = math.nan, limit: str = "network") -> Forecast:
        """What may be known of a candidate beforehand."""
        wire, steps = str(candidate.wire_dtype), candidate.local_steps
        known = DELIVERED[wire], LATE[wire] * steps if steps else 0.0
        sends = self.actual.sends(candidate)
        return Forecast(candidate, step_s, step_s, sends, limit, self.ranks, *known)

    def more_steps(self, candidate: Candidate) -> float:
        """Times as many steps as dense training that the task needs."""
        return self.expected(candidate).more_steps * self.tasks[candidate]

    @cached_property
    def allowed(self) -> list[Candidate]:
        """Candidates that are not expected to lose too much."""
        most = Auto().at_most or math.inf
        return [c for c in CANDIDATES if loss_above(self.expected(c).more_steps) <= most]

    def seconds_of(self, candidate: Candidate, begins_s: float = 0.0, steps: float | None = None) -> float:
        """Seconds until as many dense steps are done with one candidate; all: from the beginning."""
        left = (self.dense_steps if steps is None else steps) * self.more_steps(candidate)
        now_s, before_s = begins_s, self.step_s(candidate, begins_s)
        if now_s < self.changes_s < now_s + left * before_s:
            left -= (self.changes_s - now_s) / before_s
            now_s = self.changes_s
        return now_s + left * self.step_s(candidate, now_s) - begins_s

    def begins_s(self, candidate: Candidate) -> float:
        """Seconds that the first steps of a candidate take longer than later ones."""
        starting_s = EARLY * self.starting_s(candidate) if candidate.local_steps else 0.0
        return starting_s + self.compiling_s * (candidate != EXACT)

    def starting_s(self, candidate: Candidate, now_s: float = 0.0) -> float:
        """Seconds that one of the first local steps takes longer, in which second moments are compared."""
        return min(self.physics(now_s).messages_s(INT4), self.step_s(candidate, now_s)) / 2

    @cached_property
    def always(self) -> dict[Candidate, float]:
        """Seconds to the loss with each candidate from the first step on."""
        return {c: self.seconds_of(c) + self.begins_s(c) for c in CANDIDATES}

    @cached_property
    def best(self) -> Candidate:
        """Of those that are allowed, the one that is there first."""
        return min(self.allowed, key=lambda c: self.always[c])


class Ended(Exception):
    """The training has reached its loss."""


class Training:
    """A training in a world, at a time."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, Random(-1 - world.seed)
        self.now_s = self.done = 0.0  # in dense steps
        self.in_use, self.compiled, self.starting = EXACT, {EXACT}, EARLY
        self.start_s = math.nan  # lost until the first choice
        self.changes = 0

    def spend(self, seconds: float) -> None:
        """Let time pass in which nobody trains."""
        self.now_s += seconds

    def step(self, apart: bool = False) -> float:
        """Train a step, in which nothing is sent beside backward if ``apart``; returns its seconds."""
        world, candidate, r = self.world, self.in_use, self.random
        physics = world.physics(self.now_s)
        step_s = physics.step_s(candidate) * world.off[candidate]
        if apart:
            step_s = physics.computing_s + physics.messages_s(candidate) + physics.coding(candidate)
        if candidate.local_steps and self.starting:
            self.starting -= 1
            step_s += world.starting_s(candidate, self.now_s)
        step_s *= r.lognormvariate(-(world.noise**2) / 2, world.noise)
        if r.random() < world.pauses:
            step_s *= r.uniform(2, 8)
        if candidate not in self.compiled:
            self.compiled.add(candidate)
            step_s += world.compiling_s
        self.now_s += step_s
        self.done += 1 / world.more_steps(candidate)
        if self.done >= world.dense_steps:
            raise Ended
        return step_s

    def take_up(self, candidate: Candidate) -> None:
        """Go on with another candidate, and let pass what is not measured after a change."""
        before, self.in_use = self.in_use, candidate
        if before == candidate:
            return
        self.spend(self.world.step_s(candidate, self.now_s) / 2)  # new groups, and what was not sent before
        if before.local_steps and not candidate.local_steps:  # all weights and optimizer states are sent
            self.spend(STATES * self.world.physics(self.now_s).messages_s(EXACT))
        while candidate.local_steps and self.starting:
            self.step()
        for _ in range(SETTLING if candidate.local_steps else TAKING_OVER if self.done else 0):
            self.step()

    def times(self, steps: int) -> Times:
        """Train so many steps; returns what one takes, without pauses."""
        seconds = sorted(self.step() for _ in range(steps))
        longest_s = PAUSE * seconds[steps // 2]
        physics = self.world.physics(self.now_s)
        messages_s = physics.messages_s(self.in_use) * self.random.lognormvariate(0, 0.05)
        dense = physics.sends(EXACT) / physics.sends(self.in_use)
        return Times(fmean(s for s in seconds if s <= longest_s), messages_s, True, dense)

    def measured(self, doubt: float = 1.0) -> Physics:
        """What a step is made of, as far as one knows after a few of them; ``doubt`` of computing."""
        r, actual = self.random, self.world.physics(self.now_s)

        def seen(value: float, error: float) -> float:
            return value * math.exp(r.gauss(0, error))

        return replace(
            actual,
            computing_s=seen(actual.computing_s, doubt * (0.05 + self.world.noise / 2)),
            byte_s=seen(actual.byte_s, 0.12),
            hop_s=seen(actual.hop_s, 0.15),
            coding_s=seen(actual.coding_s, 0.25) / (1.4 if actual.shares_cores else 1),  # alone on its core
            applying_s=seen(actual.applying_s, 0.25) / (1.4 if actual.shares_cores else 1),
            hidden=0.6,
        )

    def forecasts(self, known: Physics) -> list[Forecast]:
        """What is expected of each candidate."""

        def limit(c: Candidate) -> str:
            return "network" if known.messages_s(c) > known.computing_s else "backward"

        return [self.world.expected(c, known.step_s(c), limit(c)) for c in CANDIDATES]

    def measure_latency(self) -> bool:
        """Send a few short messages; returns whether these take long."""
        hop_s = self.world.physics(self.now_s).hop_s
        self.spend(2 * hop_s)
        return hop_s >= 0.02

    def measure_rate(self, far: bool) -> None:
        """Send messages that tell the rate, as ``fusion.link`` does."""
        physics = self.world.physics(self.now_s)

        def one(size: int) -> float:
            return 2 * physics.hop_s + size * physics.byte_s

        if far:
            self.spend(2 * one(FEW))
            return
        sizes = [FEW * 4**i for i in range(3)]
        last = next((i for i, size in enumerate(sizes) if one(size) > 0.02), 2)
        again = (2 if one(sizes[last]) > 0.02 else 4) - 1
        self.spend(30 * physics.hop_s + sum(map(one, sizes[: last + 1])) + again * one(sizes[last]))

    def chosen(self) -> None:
        """Note that the first choice has been made, and what was lost until then."""
        if math.isnan(self.start_s):
            best = self.world.best
            self.start_s = self.now_s - self.world.seconds_of(best, 0.0, self.done) - self.world.begins_s(best)

    def watch(self, usual: Times, steps: int) -> None:
        """Go on until messages take another time."""
        windows = 0
        while True:
            if windows > 2 and not self.now_s < self.world.changes_s < math.inf:
                candidate, left = self.in_use, self.world.dense_steps - self.done
                self.spend(self.world.seconds_of(candidate, self.now_s, left))
                raise Ended
            if self._is_long_until_change(steps):
                continue
            now, windows = self.times(steps), windows + 1
            if usual.have_changed(now) or usual.may_be_for_others(now):
                self.changes += 1
                return

    def _is_long_until_change(self, steps: int) -> bool:
        """Pass the time until little before the link changes, if that is long."""
        step_s = self.world.step_s(self.in_use, self.now_s)
        left_s = self.world.changes_s - self.now_s
        windows = int(left_s / (steps * step_s)) - 1 if 0 < left_s < math.inf else 0
        done = windows * steps / self.world.more_steps(self.in_use)
        if windows < 2 or self.done + done >= self.world.dense_steps:
            return False
        self.now_s, self.done = self.now_s + windows * steps * step_s, self.done + done
        return True


Player = Callable[[Training], None]


@dataclass(frozen=True)
class Result:
    """What came of a world: regrets are parts of the best candidate's seconds."""

    world: World
    regret: float
    start_s: float
    took: Candidate


def play(seed: int, player: Player) -> Result:
    """Train in a world to its loss."""
    world = World.drawn(seed)
    training = Training(world)
    try:
        player(training)
    except Ended:
        training.chosen()
    return Result(world, training.now_s / world.always[world.best] - 1, training.start_s, training.in_use)


def always(candidate: Candidate) -> Player:
    """Return who takes one candidate from the first step on."""

    def player(training: Training) -> None:
        training.in_use, training.now_s = candidate, training.world.always[candidate]

    return player


def sparse_auto(training: Training) -> None:
    """Choose as ``auto.between_steps`` does, by the same policy."""
    at_most, world, in_use = Auto().at_most, training.world, INT4
    while True:
        far = training.measure_latency()
        if not far:
            training.measure_rate(far)
            known = training.measured(3.0)
            in_use = min((INT4, EXACT, BFLOAT16), key=lambda c: known.messages_s(c) + known.coding(c))
        training.take_up(in_use)
        for _ in range(GLIMPSE_OF_DEVICE.settling * world.on_device):
            training.step()
        training.step(apart=True)
        if far:
            training.measure_rate(far)
        known = training.measured(2.0)
        if known.messages_s(in_use) + known.coding(in_use) <= known.computing_s:
            for i in range(CHOOSING.beside + CHOOSING.apart):
                training.step(apart=i >= CHOOSING.beside)
            known = training.measured()
        expected = {f.candidate: f for f in training.forecasts(known)}
        hoped = soonest([replace(f, delivered=None, staleness=None) for f in expected.values()], at_most)
        training.spend(world.looking_s)
        allowed = soonest([expected[f.candidate] for f in hoped], at_most)
        choosing = Trials(allowed, STATES * known.messages_s(EXACT))
        times: dict[Candidate, Times] = {}
        while (candidate := choosing.next()) is not None:
            training.take_up(candidate)
            times[candidate] = training.times(max(trials.TIMED, LEAST_ROUNDS * candidate.local_steps))
            choosing.note(candidate, times[candidate].step_s)
        training.take_up(choosing.best)
        training.chosen()
        training.watch(times[choosing.best], WATCHED)


def knowing(training: Training) -> None:
    """Know every candidate's seconds, and of its steps what is expected: what measuring can at most tell."""
    world = training.world
    of_all = {c: world.always[c] / world.tasks[c] for c in world.allowed}
    always(min(of_all, key=lambda c: of_all[c]))(training)


def share(values: Iterable[float], part: float) -> float:
    """The value below which this part of all lies."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def row(name: str, results: Sequence[Result]) -> str:
    """Return a line of the table."""
    regrets = [each.regret for each in results]
    exact = [each.regret for each in results if each.world.best == EXACT]
    starts = [each.start_s for each in results]
    numbers = [fmean(regrets), share(regrets, 0.95), max(regrets), fmean(exact), share(exact, 0.95)]
    return f"| {name} | " + " | ".join(f"{100 * x:.1f}" for x in numbers) + f" | {share(starts, 0.95):.2f} |"


HEAD = """| | mean % | 95 % | worst | float32 best: mean | 95 % | start s, 95 % |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""
# Constants of the policy, and what each is in its row: next to nothing, or where that has no end, far more.
WITHOUT: dict[str, float] = {
    "COMMON": 0.0,
    "OWN": 1e-9,
    "LASTS_S": 1e9,
    "TIMED": 3,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=2000, help="how many, of which each has a number")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="another row")
    options = parser.parse_args()
    seeds = range(options.worlds)
    print(HEAD)
    players = {
        "ddp": always(EXACT),
        str(USUAL): always(USUAL),
        "all seconds known": knowing,
        "sparse_auto": sparse_auto,
    }
    for name, player in players.items():
        print(row(name, [play(seed, player) for seed in seeds]), flush=True)
    for name, value in [(name, float(value)) for name, value in options.set] or WITHOUT.items():
        before = getattr(trials, name)
        setattr(trials, name, type(before)(value))
        print(row(f"{name} = {value:g}", [play(seed, sparse_auto) for seed in seeds]), flush=True)
        setattr(trials, name, before)


if __name__ == "__main__":
    main()
