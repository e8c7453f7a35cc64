"""Certified L2 radii of smoothed classifiers (section 3.4; Cohen et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from advbayes import checks
from advbayes.metrics.intervals import clopper_pearson
from advbayes.predictive.smoothing import Smoothed

ABSTAIN = -1


@dataclass(frozen=True, eq=False)
class Certificates:
    """Each input's certified class (-1: abstained), radius (0 there) and bound of its vote.

    With probability 1 - alpha no perturbation of smaller L2 norm changes the smoothed vote.
    """

    classes: Tensor  # (B,) int64
    radii: Tensor  # (B,) float64
    lower: Tensor  # (B,) float64
    sigma: float
    alpha: float
    n0: int
    n: int

    @property
    def abstained(self) -> Tensor:  # (B,) bool
        return self.classes == ABSTAIN

    def accuracy(
        self,
        y: Tensor,  # (B,)
        radii: float | Sequence[float] | Tensor,  # (R,)
    ) -> Tensor:  # (R,)
        """The certified-accuracy curve: the share of inputs certified right at each radius.

        >>> classes, radii = torch.tensor([0, 1, -1]), torch.tensor([0.3, 0.7, 0.0])
        >>> certificates = Certificates(classes, radii, torch.ones(3), 0.5, 0.001, 1, 1)
        >>> certificates.accuracy(torch.tensor([0, 1, 1]), [0.0, 0.5])
        tensor([0.6667, 0.3333], dtype=torch.float64)
        """
        if y.shape != self.classes.shape:
            raise checks.InputError(f"y must have shape {tuple(self.classes.shape)}", got=y)
        at = torch.as_tensor(radii, dtype=torch.float64, device=self.radii.device).reshape(-1)
        right = self.classes == y
        return (right & (self.radii.double() >= at.unsqueeze(1))).double().mean(1)


def certify(
    smoothed: Smoothed,
    x: Tensor,  # (B, *event)
    *,
    n0: int = 100,
    n: int = 10_000,
    alpha: float = 0.001,
    generator: torch.Generator | None = None,
    batch: int = 256,
) -> Certificates:
    """Certified L2 radii: sigma Phi^-1(p), where p <= P(vote = c) with confidence 1 - alpha.

    The class c comes from `n0` draws, p from `n` others (Clopper and Pearson's one-sided bound); p
    <= 1/2 abstains. Draws are independent for every input. A smoothed `FreshPredictive` draws a
    theta with every noise, so the Bayesian vote is certified.

    >>> from torch.distributions import Categorical
    >>> smoothed = Smoothed(lambda x: Categorical(logits=torch.cat([x, -x], 1)), 0.5)
    >>> seeded = torch.Generator().manual_seed(0)
    >>> certified = certify(smoothed, torch.ones(1, 1), n=1000, generator=seeded)
    >>> int(certified.classes), bool(0.5 < certified.radii < 1.0)
    (0, True)
    """
    checks.instance("smoothed", smoothed, Smoothed, "a Smoothed predictor")
    checks.number("sigma", smoothed.sigma, low=0, open_low=True)
    n0, n, batch = checks.count("n0", n0), checks.count("n", n), checks.count("batch", batch)
    alpha = checks.number("alpha", alpha, low=0, high=1, open_low=True, open_high=True)
    checks.finite("x", x)
    classes, lower = [], []
    for start in range(0, len(x), batch):
        part = x[start : start + batch]
        guess = smoothed.votes(part, n0, generator=generator).argmax(-1)
        votes = smoothed.votes(part, n, generator=generator)
        for_guess = votes.gather(1, guess.unsqueeze(1)).squeeze(1).tolist()
        classes.append(guess)
        lower += [clopper_pearson(k, n, level=1 - alpha, side="lower")[0] for k in for_guess]
    bounds = torch.tensor(lower, dtype=torch.float64, device=x.device)
    quantile = NormalDist().inv_cdf
    radii = [smoothed.sigma * quantile(bound) if bound > 0.5 else 0.0 for bound in lower]
    guessed = torch.cat(classes) if classes else torch.empty(0, dtype=torch.int64, device=x.device)
    return Certificates(
        classes=torch.where(bounds > 0.5, guessed, torch.full_like(guessed, ABSTAIN)),
        radii=torch.tensor(radii, dtype=torch.float64, device=x.device),
        lower=bounds,
        sigma=smoothed.sigma,
        alpha=alpha,
        n0=n0,
        n=n,
    )
