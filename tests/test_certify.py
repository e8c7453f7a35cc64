"""Certified radii: their bound, their abstentions, their curve, and the Bayesian vote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution

from advbayes import BayesianModel, Categorical, FreshPredictive, MeanField, Samples
from advbayes.checks import InputError
from advbayes.cli import main
from advbayes.predictive import ABSTAIN, Certificates, Smoothed, certify
from advbayes.runs import Run, prepare
from tests.oracles import FLOAT, generator


def sign(x: Tensor) -> CategoricalDistribution:
    """Class 0 where the first coordinate is positive."""
    return CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1), validate_args=False)


def test_unanimous_votes_certify_the_most_that_the_draws_allow() -> None:
    found = certify(
        Smoothed(sign, 0.25),
        torch.tensor([[9.0, 0.0], [-9.0, 0.0]], dtype=FLOAT),
        n0=10,
        n=1000,
        alpha=0.001,
    )
    most = 0.25 * NormalDist().inv_cdf(0.001 ** (1 / 1000))
    assert found.classes.tolist() == [0, 1]
    torch.testing.assert_close(found.radii, torch.full((2,), most, dtype=FLOAT), rtol=1e-12, atol=0)


def test_a_tie_abstains() -> None:
    found = certify(
        Smoothed(sign, 0.25),
        torch.zeros(50, 2, dtype=FLOAT),
        n0=10,
        n=500,
        alpha=0.01,
        generator=generator(0),
    )
    assert int(found.abstained.sum()) >= 45
    assert bool((found.classes[found.abstained] == ABSTAIN).all())
    assert bool((found.radii[found.abstained] == 0).all())


def test_curve_counts_the_right_and_certified() -> None:
    found = Certificates(
        torch.tensor([0, 1, 1, ABSTAIN]),
        torch.tensor([0.5, 0.2, 0.9, 0.0], dtype=FLOAT),
        torch.ones(4, dtype=FLOAT),
        0.25,
        0.001,
        1,
        1,
    )
    curve = found.accuracy(torch.tensor([0, 1, 0, 0]), [0.0, 0.2, 0.3, 0.6])
    assert curve.tolist() == [0.5, 0.5, 0.25, 0.0]
    with pytest.raises(ValueError, match="y must have shape"):
        found.accuracy(torch.zeros(3), [0.0])


def test_batches_change_nothing_but_the_draws() -> None:
    x = torch.tensor([[0.4, 0.0]], dtype=FLOAT).repeat(30, 1)
    for batch in (7, 256):
        found = certify(Smoothed(sign, 0.5), x, n=2000, batch=batch, generator=generator(1))
        assert bool((found.classes == 0).all())
        assert float(found.radii.max()) < 0.45
        assert 0.3 < float(found.radii.mean()) < 0.4
        assert len(found.radii.unique()) > 10  # every input has noise of its own
    assert len(certify(Smoothed(sign, 0.5), x[:0], n=10).radii) == 0


def test_fresh_thetas_certify_the_bayesian_vote() -> None:
    """theta ~ N(m, s^2) as a threshold: the vote is a Gaussian of noise and theta together."""
    net = nn.Linear(1, 2).to(FLOAT)
    model = BayesianModel(net, Categorical())
    spread, sigma, x = 0.8, 0.5, 0.6
    # logits 50 x + b0, -50 x + b1: class 0 where 100 x + b0 - b1 > 0
    theta = torch.tensor([50.0, -50.0, 0.0, 0.0], dtype=FLOAT)
    posterior = MeanField(model, init=theta, init_scale=50.0 * spread * math.sqrt(2.0))
    smoothed = Smoothed(FreshPredictive(model, posterior, 1), sigma)
    votes = smoothed.votes(torch.full((64, 1), x, dtype=FLOAT), 400, generator=generator(0))
    share = float(votes[:, 0].double().sum()) / (64 * 400)
    draws = posterior.sample(200_000, generator=generator(1))
    noise = sigma * torch.randn(200_000, dtype=FLOAT, generator=generator(2))
    wanted = float(
        ((draws[:, 0] - draws[:, 1]) * (x + noise) + draws[:, 2] - draws[:, 3] > 0).double().mean()
    )
    # draws of theta are shared by the 64 inputs, so there are 400 independent thetas
    assert abs(share - wanted) < 4.9 * math.sqrt(0.25 / 400)
    fixed = float(NormalDist().cdf(x / sigma))  # what one theta at the mean would vote
    assert abs(fixed - wanted) > 0.05
    found = certify(
        smoothed,
        torch.full((4, 1), x, dtype=FLOAT),
        n0=20,
        n=300,
        alpha=0.01,
        generator=generator(3),
    )
    assert bool((found.lower < wanted).all())


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_theta_hidden_in_a_function_comes_with_every_draw(wrapped: bool) -> None:
    """Half of the thetas say 0 wherever x is, the others 1: nothing can be certified. Where a pass
    of 1,024 draws shared a theta, two of them in a row looked like a vote beyond doubt."""
    model = BayesianModel(nn.Linear(1, 2), Categorical())
    zero, one = torch.tensor([[0.0, 0.0, 5.0, -5.0], [0.0, 0.0, -5.0, 5.0]])
    for seed in range(8):
        fresh = FreshPredictive(model, Samples(torch.stack([zero, one])), 1, generator(seed))
        predict = (lambda x, fresh=fresh: fresh(x)) if wrapped else fresh
        found = certify(Smoothed(predict, 0.5), torch.zeros(1, 1), n=1500, generator=generator(9))
        assert found.classes.tolist() == [ABSTAIN]


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(1, 2, dtype=FLOAT)
    for settings, message in (
        ({"smoothed": sign}, "smoothed must be a Smoothed"),
        ({"smoothed": Smoothed(sign, 0.0)}, "sigma must be"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"n": 0}, "n must be"),
        ({"x": x * math.nan}, "x must be finite"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            certify(**({"smoothed": Smoothed(sign, 0.5), "x": x, "n": 10} | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_net_that_diverged_is_not_certified(bad: float) -> None:
    def predict(x: Tensor) -> CategoricalDistribution:
        logits = torch.stack([x[:, 0], bad * torch.ones(len(x)), -x[:, 0]], 1)
        return CategoricalDistribution(logits=logits, validate_args=False)

    with pytest.raises(InputError, match="logits of the draws"):
        certify(Smoothed(predict, 0.5), torch.ones(2, 1), n=100)
    never = lambda x: CategoricalDistribution(  # noqa: E731
        logits=torch.stack([x[:, 0], torch.full((len(x),), -math.inf)], 1), validate_args=False
    )
    assert certify(Smoothed(never, 0.5), torch.ones(2, 1), n=100).classes.tolist() == [0, 0]


def test_the_curve_of_the_command_counts_right_classes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Share of the examples whose class is the label's and whose radius reaches that far, from the
    classes and radii that are written; labels of noise, so that many are wrong."""
    rng = np.random.default_rng(0)
    points, kinds = rng.normal(size=(80, 2)), rng.choice(["no", "yes"], 80)
    rows = [f"{a:.3f},{b:.3f},{kind}" for (a, b), kind in zip(points, kinds, strict=True)]
    (tmp_path / "noise.csv").write_text("a,b,kind\n" + "\n".join(rows))
    run = str(tmp_path / "run")
    train = ["train", "--data", str(tmp_path / "noise.csv"), "--target", "kind", "--epochs", "10"]
    assert main([*train, "--hidden", "4", "--out", run, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["certify", run, "--num", "16", "--draws", "200", "--alpha", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = prepare(Run.open(run).config).y_test[:16].tolist()
    right = [label == guess for label, guess in zip(labels, found["classes"], strict=True)]
    certified = [radius > 0 for radius in found["radii"]]
    assert any(c and not r for c, r in zip(certified, right, strict=True))
    for point in found["curve"]:
        held = zip(right, found["radii"], strict=True)
        reached = sum(is_right and radius >= point["radius"] for is_right, radius in held)
        assert point["certified_accuracy"] == reached / 16
    assert found["abstained"] == sum(guess < 0 for guess in found["classes"])
