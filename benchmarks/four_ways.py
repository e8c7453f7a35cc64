"""Through which thetas should an attack go? The four ways compared on digits; the table of
docs/attacks.md.

python benchmarks/four_ways.py
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    FreshPredictive,
    MeanField,
    PosteriorPredictive,
    fit,
    pgd,
)
from advbayes.channels import Noise
from advbayes.seeds import generator_for
from advbayes.types import Predictor


def main() -> None:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=generator_for(0, "split"))
    x = torch.tensor(digits.data, dtype=torch.float32).div(16)[order]
    y = torch.tensor(digits.target)[order]
    (x, x_train), (y, y_train) = x.split([500, len(x) - 500]), y.split([500, len(y) - 500])
    rows = []
    for width in (
        "narrow",
        "wide",
    ):  # how far apart the thetas are: as trained, and with three times its standard deviations
        model = BayesianModel(
            nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)),
            Categorical(),
            prior_scale=0.5,
        )
        posterior = MeanField(model)
        fit(model, posterior, Noise(0.1), (x_train, y_train), epochs=60, seed=0)
        if width == "wide":
            with torch.no_grad():
                posterior.rho.copy_(torch.log(torch.expm1(3 * posterior.scale)))
        thetas = posterior.sample(20, generator=generator_for(0, "thetas")).detach()
        known = PosteriorPredictive(model, thetas)
        fresh = PosteriorPredictive(
            model, posterior.sample(200, generator=generator_for(0, "evaluation")).detach()
        )
        ways: dict[str, Predictor] = {
            "known thetas": known,
            "fresh thetas": FreshPredictive(model, posterior, 20, generator_for(0, "fresh")),
            "one theta": model.at(
                posterior.sample(1, generator=generator_for(0, "one"))[0].detach()
            ),
            "posterior mean": model.at(posterior.mean),
        }
        for name, way in ways.items():
            x_adv = pgd(L2(0.8, box=(0, 1)), 50)(way, x, y)
            with torch.no_grad():
                left = [
                    float((p(x_adv).logits.argmax(-1) == y).double().mean()) for p in (known, fresh)
                ]
            rows.append(f"| {width} | {name} | {left[0]:.3f} | {left[1]:.3f} |")
    sys.stdout.write(
        "\n".join(
            [
                "| posterior | attack through | known thetas | fresh thetas |",
                "|---|---|---|---|",
                *rows,
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
