"""Means, spreads, and whether a difference can be told from noise.

>>> differ(Sample((0.90, 0.91, 0.92)), Sample((0.70, 0.71, 0.72)))
True
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SIGNIFICANCE_LEVEL = 0.05
"""How often a difference may be named where there is none."""


@dataclass(frozen=True)
class Sample:
    """One figure of several runs that differ in their seed only."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n

    @property
    def variance(self) -> float:
        return math.fsum((v - self.mean) ** 2 for v in self.values) / (self.n - 1)

    @property
    def sd(self) -> float | None:
        """Of the single value; None where one alone says nothing about it."""
        return math.sqrt(self.variance) if self.n > 1 else None

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


def differ(one: Sample, other: Sample, num_comparisons: int = 1) -> bool:
    """Whether the means differ by more than their spreads explain: Welch's t-test, with the level
    shared out among `num_comparisons` (Bonferroni). Never with a single run on either side."""
    if one.n < 2 or other.n < 2:
        return False
    parts = [sample.variance / sample.n for sample in (one, other)]
    error = math.fsum(parts)
    difference = abs(one.mean - other.mean)
    if error <= (1e-12 * max(abs(one.mean), abs(other.mean))) ** 2:
        # no spread at all: figures that come in steps are soon equal by chance
        return min(one.n, other.n) > 2 and difference > 1e-9 * max(abs(one.mean), abs(other.mean))
    freedom = error**2 / math.fsum(
        part**2 / (sample.n - 1) for part, sample in zip(parts, (one, other), strict=True)
    )
    return two_sided(difference / math.sqrt(error), freedom) < SIGNIFICANCE_LEVEL / num_comparisons


def best_of(samples: Sequence[Sample], *, most: bool) -> tuple[int, list[int]]:
    """Which has the best mean, and which others cannot be told from it."""
    means = [sample.mean for sample in samples]
    best = means.index(max(means) if most else min(means))
    others = [i for i in range(len(samples)) if i != best]
    near = [i for i in others if not differ(samples[best], samples[i], len(others))]
    return best, near


def two_sided(t: float, freedom: float) -> float:
    """How probable it is that Student's t lies at least so far from 0."""
    return _beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction below converges slowly
        return 1 - _beta_share(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float, depth: int = 200) -> float:
    """Its continued fraction 1 + d1/(1 + d2/(1 + ...)), from the inside out."""
    value = 1.0
    for n in range(depth, 0, -1):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + d / value
    return value
