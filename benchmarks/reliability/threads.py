"""Eight threads against one: predictions for five kinds of net, two fits side by side, a regressor
under joblib's threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import outcome
import torch
from tests.test_threads import NETS, make
from torch import Tensor

from advbayes import (
    L2,
    AttackChannel,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    fit,
    margin,
    nll,
    one_step,
)
from advbayes.estimators import RobustRegressor

THREADS, ANSWERS, FITS = 8, 1000, 10


def wrong_answers(kind: str) -> int:
    """Of THREADS x ANSWERS predictions and gradients, through four predictors of one model: how
    many differ in any bit."""
    model, thetas, x, y = make(kind)
    predictors = [PosteriorPredictive(model, part) for part in thetas.split(3)]

    def answer(i: int) -> tuple[Tensor, Tensor]:
        rows, predict = slice(i % 7, i % 7 + 4), predictors[i % 4]
        if i % 2:
            return predict(x[rows]).logits, model.at(thetas[i % 12])(x[rows]).logits
        leaf = thetas[i % 12].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model.log_likelihood(leaf, x[rows], y[rows]).sum(), leaf)
        return predict.loss_and_gradient(nll, x[rows], y[rows])[2], gradient

    wanted = [answer(i) for i in range(84)]
    begin = threading.Barrier(THREADS)

    def one_thread(first: int) -> int:
        begin.wait()
        answers = ((i % 84, answer(i % 84)) for i in range(first, first + ANSWERS))
        return sum(not all(map(torch.equal, got, wanted[i])) for i, got in answers)

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(one_thread, range(THREADS)))


def wrong_fits() -> int:
    """Two fits at once of two models that share a channel; how many of 2 x FITS end elsewhere than
    alone."""
    models = [make(kind) for kind in ("group norm resnet", "own module")]
    channel = Mixture(
        [0.4, 0.3, 0.3],
        [Noise(0.1), *(AttackChannel(one_step(L2(0.5), loss), 0.1) for loss in (nll, margin))],
    )

    def trained(which: int) -> Tensor:
        model, _, x, y = models[which]
        posterior = MeanField(model)
        fit(model, posterior, channel, (x, y), steps=20, batch_size=20, seed=which, progress=False)
        return posterior.mu.detach()

    wanted, wrong = [trained(0), trained(1)], 0
    for _ in range(FITS):
        with ThreadPoolExecutor(2) as pool:
            wrong += sum(
                not torch.equal(got, alone)
                for got, alone in zip(pool.map(trained, range(2)), wanted, strict=True)
            )
    return wrong


def wrong_regressions() -> int:
    """Of 400 predictions of one RobustRegressor asked by joblib's threads: how many differ in any
    bit."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 4))
    y = x[:, 0] - x[:, 1] + 0.1 * draw.normal(size=200)
    regressor = RobustRegressor(epochs=2).fit(x, y)
    wanted = [regressor.predict(x[i : i + 5]) for i in range(20)]
    ask = (joblib.delayed(regressor.predict)(x[i % 20 : i % 20 + 5]) for i in range(400))
    got = joblib.Parallel(n_jobs=THREADS, prefer="threads")(ask)
    return sum(not np.array_equal(answer, wanted[i % 20]) for i, answer in enumerate(got))


def main() -> None:
    start = time.time()
    wrong = {kind: wrong_answers(kind) for kind in NETS}
    fits, regressions = wrong_fits(), wrong_regressions()
    outcome.write(
        "threads",
        wanted=f"{THREADS} threads x {ANSWERS} answers for each net, {2 * FITS} fits, 400 "
        f"regressions: no bit differs",
        passed=not any(wrong.values()) and not fits and not regressions,
        seed=0,
        seconds=time.time() - start,
        wrong_of_8000=wrong,
        wrong_fits_of_20=fits,
        wrong_regressions_of_400=regressions,
    )


if __name__ == "__main__":
    main()
