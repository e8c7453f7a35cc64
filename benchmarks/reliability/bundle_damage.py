"""1,000 single-bit flips and 100 truncations of a saved model: all refused, naming the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import trials

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    MeanField,
    Mixture,
    Noise,
    one_step,
)
from advbayes.networks import conv_net
from advbayes.store import load, save


def main() -> None:
    model = BayesianModel(conv_net(size=8), Categorical())
    channel = Mixture([0.5, 0.5], [Noise(0.1), AttackChannel(one_step(L2(1.0)), 0.1)])
    with tempfile.TemporaryDirectory() as home:
        folder, file = Path(home) / "model", Path(home) / "model.advbayes"
        for path in (folder, file):
            save(
                path,
                model=model,
                posterior=MeanField(model),
                channel=channel,
                class_names="0123456789",
            )
        # Half of the trials on the one file, half on the folder, there on each file alike: small
        # ones are hit as often.
        places = [
            place for part in sorted(folder.iterdir()) for place in ((part, folder), (file, file))
        ]

        def intact() -> bool:
            thetas = [load(path).model.initial_theta() for path in (folder, file)]
            return all(torch.equal(theta, model.initial_theta()) for theta in thetas)

        trials.damage("bundle_damage", places, lambda path, _: load(path), intact)


if __name__ == "__main__":
    main()
