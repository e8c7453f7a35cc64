"""Deliberate bugs: each is planted in a copy of the package, and the tests must notice.

    python tests/mutations.py            all of them; writes benchmarks/results/mutations.{json,md}
    python tests/mutations.py PATTERN    those whose name contains PATTERN; writes nothing
    python tests/mutations.py --slips    the list of `tests/slips.py` instead, which another hand than the tests' wrote
    python tests/mutations.py --first    the test files named with a bug alone, not all the others
    python tests/mutations.py --reach    all tests that run the line changed, the quickest first (see `tests/reach.py`)

A bug is looked for first by the test that caught it last, then in the test files named with it, then in all the others of
`TESTS`. Every run is a fork of one process that has imported torch already. At the end the tests that caught something run
once on the package as it is: one that fails there as well has caught nothing.
"""

# ruff: noqa: E501 (the lines to change are quoted whole)

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.reach import Reach  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NAMES = """
test_likelihoods test_model test_balls test_contracts test_identities_attacks test_identities_limits
test_identities_proactive test_identities_reactive test_training test_calibration test_attacks test_accelerated
"""
TESTS = NAMES.split()
SECONDS = 600  # of the processor, for one run of pytest; ten times as many on the clock


@dataclass(frozen=True)
class Bug:
    name: str
    file: str  # below src/advbayes
    old: str
    new: str
    tests: str  # where it should be caught first


BUGS = (
    Bug(
        "a trivial predictor's ties go to the first class",
        "evaluation/scoring.py",
        "guesses = isinstance(predict, metrics.ConstantClasses)",
        "guesses = False",
        "test_trivial_ties",
    ),
    Bug(
        "sample weights do not reach the bound",
        "objectives.py",
        "rows = rows if weight is None else rows * weight",
        "rows = rows if weight is None else rows * 1",
        "test_sample_weight",
    ),
    Bug(
        "features are standardised without their weights",
        "estimators.py",
        "share = (weights / weights.sum())",
        "share = (torch.ones_like(weights) / len(weights))",
        "test_sample_weight",
    ),
    Bug(
        "a scaler's centre is forgotten",
        "adapters/sklearn.py",
        "shift = np.zeros(()) if centre is None else -centre * factor",
        "shift = np.zeros(())",
        "test_sklearn_predictors",
    ),
    Bug(
        "the mask stays where the attack itself is tried",
        "auditing/strength.py",
        "free=eps == whole",
        "free=False",
        "test_table_users",
    ),
    Bug(
        "a tensor on the default device",
        "training/batches.py",
        'generator_for(self.seed, "order", epoch), device="cpu"',
        'generator_for(self.seed, "order", epoch)',
        "test_devices",
    ),
    Bug(
        "evaluation shares the global generator between threads",
        "evaluation/measuring.py",
        "    return GlobalStream(seed_for(seed, key, step))",
        "    torch.manual_seed(seed_for(seed, key, step))\n    return torch.random.fork_rng()",
        "test_global_stream",
    ),
    Bug(
        "a stream begins anew each time",
        "seeds.py",
        "        self._state = _states()",
        "        self._state = None",
        "test_global_stream",
    ),
    Bug(
        "several outputs are left along their own axes alone",
        "attacks/apgd.py",
        "        if outputs == 1:\n            return each",
        "        if outputs >= 1:\n            return each",
        "test_attack_strength",
    ),
    Bug(
        "a bundle stays on the CPU",
        "store/bundle.py",
        "key: value.to(device) for key",
        'key: value.to("cpu") for key',
        "test_store_model",
    ),
    Bug(
        "the playground attacks every defense through the first one",
        "experiments/playground/moves.py",
        "x_adv = panels[0].x_adv[None] if panels and made_for else None",
        "x_adv = panels[0].x_adv[None] if panels else None",
        "test_playground",
    ),
    Bug(
        "the playground's densities are left in standard deviations",
        "experiments/playground/moves.py",
        "Answer(densities[i] / unit, places,",
        "Answer(densities[i], places,",
        "test_playground",
    ),
    Bug(
        "the playground listens to everybody",
        "cli/experiments.py",
        '"server.address": "127.0.0.1"',
        '"server.address": "0.0.0.0"',
        "test_playground",
    ),
    Bug(
        "Wilson's interval of a lower level",
        "metrics/intervals.py",
        "p, z2 = successes / num, normal_quantile(level) ** 2",
        "p, z2 = successes / num, normal_quantile(1 - 2 * (1 - level)) ** 2",
        "test_interval_coverage",
    ),
    Bug(
        "bootstrap quantiles of a lower level",
        "metrics/intervals.py",
        "0.5 - 0.5 * confidence_level(level), 0.5 + 0.5 * level)",
        "0.55 - 0.5 * confidence_level(level), 0.45 + 0.5 * level)",
        "test_interval_coverage",
    ),
    Bug(
        "an odd call is in neither half",
        "evaluation/scoring.py",
        '"_second": calls[repeats // 2 :]}',
        '"_second": calls[-(repeats // 2) :]}',
        "test_interval_coverage",
    ),
    Bug(
        "the conformal quantile forgets the new example",
        "predictive/conformal.py",
        "(len(scores) + 1) * level",
        "(len(scores) - 1) * level",
        "test_decisions_and_conformal",
    ),
    Bug(
        "a conformal interval ends at the last digit of its quantile",
        "predictive/conformal.py",
        "half = half + _DIGITS * torch.finfo(mean.dtype).eps * (mean.abs() + half)",
        "pass",
        "test_decisions_and_conformal",
    ),
    Bug(
        "the worst case of an action in regression is looked for from x alone",
        "predictive/decisions.py",
        "attacks.append(MultiStart(ball, loss, steps, _STARTS))",
        "pass",
        "test_decisions_and_conformal",
    ),
    Bug(
        "in regression a suite keeps the least likely point, not the largest error",
        "attacks/suite.py",
        "return squared_error if errors else nll",
        "return nll",
        "test_minimum_norm_and_suites",
    ),
    Bug(
        "the worst case of an action is its best",
        "predictive/decisions.py",
        "return -self.choices.expected(prediction)[:, self.action]",
        "return self.choices.expected(prediction)[:, self.action]",
        "test_decisions_and_conformal",
    ),
    Bug(
        "an altered array passes",
        "evaluation/files.py",
        ".hexdigest() == block.array",
        '.hexdigest() != ""',
        "test_evaluation_files",
    ),
    Bug(
        "what a function closes over is not compared",
        "evaluation/contents.py",
        '"closure": cells,',
        '"closure": {},',
        "test_evaluation_files",
    ),
    Bug(
        "sources draw from where they are",
        "evaluation/measuring.py",
        "return rebuilt(attack, change)",
        "return attack",
        "test_evaluation_files",
    ),
    Bug(
        "Square's schedule ignores its budget",
        "attacks/black_box.py",
        "sum(query > mark * self.queries for mark in marks)",
        "sum(query > mark * 10_000 for mark in marks)",
        "test_attack_strength",
    ),
    Bug(
        "steps that creep along the sphere",
        "attacks/ascent.py",
        "return eps * max(0.01, math.pow(0.5 * (1 + math.cos(math.pi * step / steps)), 1.5))",
        "return 0.05 * eps",
        "test_attack_strength",
    ),
    Bug(
        "no whole run to the nearest classes",
        "attacks/apgd.py",
        "best, _ = run(best, loss, points[pick, everything], self.steps)",
        "best, _ = run(best, loss, points[pick, everything], 1)",
        "test_attack_strength",
    ),
    Bug(
        "an output is only ever raised",
        "attacks/apgd.py",
        "for sign in (1, -1))",
        "for sign in (1, 1))",
        "test_attack_strength",
    ),
    Bug(
        "theta hangs in the shared module tree",
        "model.py",
        "copied = copy.deepcopy(self.net, memo)",
        "copied = self.net",
        "test_threads",
    ),
    Bug(
        "the lock around a net that cannot be copied is lost",
        "model.py",
        "with self._lock:",
        "if self._lock:",
        "test_threads",
    ),
    Bug(
        "a tree is idle while its graph is to be run again",
        "model.py",
        'notes["advbayes"] = lease',
        "pass",
        "test_threads",
    ),
    Bug(
        "a copy of the tree outlives a change of the net",
        "model.py",
        "if tree.is_current():",
        "if True:",
        "test_threads",
    ),
    Bug(
        "threads share the flag of gradients through attacks",
        "attacks/gradients.py",
        '_through: ContextVar[bool] = ContextVar("through", default=False)  # of this thread alone',
        """class _Shared:
    def __init__(self) -> None:
        self.value = False
    def get(self) -> bool:
        return self.value
    def set(self, value: bool) -> bool:
        before, self.value = self.value, value
        return before
    reset = set
_through = _Shared()""",
        "test_threads",
    ),
    Bug(
        "ensembles draw from the global generator side by side",
        "posteriors.py",
        "    with GlobalStream(seed):\n        for layer",
        "    with torch.random.fork_rng():\n        torch.manual_seed(seed)\n        for layer",
        "test_threads",
    ),
    Bug(
        "ascent goes down (L2)",
        "attacks/balls.py",
        "return _each(step, direction) * direction * unit",
        "return -_each(step, direction) * direction * unit",
        "test_balls",
    ),
    Bug(
        "ascent goes down (Linf)",
        "attacks/balls.py",
        "* gradient.sign() *",
        "* -gradient.sign() *",
        "test_balls",
    ),
    Bug(
        "no projection",
        "attacks/gradients.py",
        "return ball.project(point + ball.ascend(usable, step), x)",
        "return point + ball.ascend(usable, step)",
        "test_contracts",
    ),
    Bug(
        "ball centred on the iterate",
        "attacks/gradients.py",
        "return ball.project(point + ball.ascend(usable, step), x)",
        "return ball.project(point + ball.ascend(usable, step), point)",
        "test_contracts",
    ),
    Bug(
        "box forgotten",
        "attacks/balls.py",
        "        if self.box is None:\n            return x\n        low, high = self.box\n        if isinstance(low, Tensor)",
        "        if True:\n            return x\n        low, high = self.box\n        if isinstance(low, Tensor)",
        "test_balls",
    ),
    Bug(
        "mask forgotten",
        "attacks/balls.py",
        "d = self.within_reach(x_adv - x, x)",
        "d = x_adv - x",
        "test_balls",
    ),
    Bug(
        "per-feature scale forgotten in the norm",
        "attacks/balls.py",
        "return d if self.scale is None else d / _on(self.scale, d)",
        "return d",
        "test_balls",
    ),
    Bug(
        "random start leaves the ball",
        "attacks/balls.py",
        "length = self.eps * radius",
        "length = 2 * self.eps * radius",
        "test_balls",
    ),
    Bug(
        "random start hugs the centre",
        "attacks/balls.py",
        "** (1.0 / free)",
        "** 1.0",
        "test_balls",
    ),
    Bug(
        "small gradients floored by their square",
        "attacks/balls.py",
        "    flat = flat / _or_infinite(flat.abs().amax(1, keepdim=True))\n    return (flat / _or_infinite(torch.linalg.vector_norm(flat, dim=1, keepdim=True))).view_as(d)",
        "    return (flat / flat.square().sum(1, keepdim=True).clamp_min(1e-12).sqrt()).view_as(d)",
        "test_balls",
    ),
    Bug(
        "last iterate kept",
        "attacks/search.py",
        """better = (other.broken & ~self.broken) | (
            (other.broken == self.broken) & (other.value >= self.value)
        )""",
        "better = torch.ones_like(other.broken)",
        "test_identities_limits",
    ),
    Bug(
        "a broken iterate is given up for a larger loss",
        "attacks/search.py",
        """better = (other.broken & ~self.broken) | (
            (other.broken == self.broken) & (other.value >= self.value)
        )""",
        "better = other.value >= self.value",
        "test_attacks",
    ),
    Bug(
        "no start at the one-step point",
        "attacks/ascent.py",
        "edge = head.move(point[:from_x], gradient[:from_x], self.ball.eps)",
        "edge = head.move(point[:from_x], gradient[:from_x], 0.01 * size)",
        "test_identities_limits",
    ),
    Bug(
        "margin compares a class with itself",
        "attacks/losses.py",
        'others = logits.scatter(1, y.unsqueeze(1), float("-inf"))',
        "others = logits",
        "test_identities_attacks",
    ),
    Bug(
        "entropy attack seeks certainty",
        "attacks/losses.py",
        "return _per_example(prediction.entropy())",
        "return _per_example(-prediction.entropy())",
        "test_identities_attacks",
    ),
    Bug(
        "squared error broadcasts (B, 1) against (B,)",
        "attacks/losses.py",
        "(mean - targets_like(mean, y)).square()",
        "(mean - y).square()",
        "test_identities_attacks",
    ),
    Bug(
        "mean of logs for log of means",
        "likelihoods.py",
        "mixed = torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])",
        "mixed = log_probs.mean(0)",
        "test_likelihoods",
    ),
    Bug(
        "softmax twice",
        "likelihoods.py",
        "return CategoricalDistribution(logits=output, validate_args=False)",
        "return CategoricalDistribution(logits=output.softmax(-1), validate_args=False)",
        "test_likelihoods",
    ),
    Bug(
        "weights normalised over the wrong axis",
        "likelihoods.py",
        "self.log_weights = columns.expand(num, batch).log_softmax(0)",
        "self.log_weights = columns.expand(num, batch).log_softmax(1)",
        "test_likelihoods",
    ),
    Bug(
        "predictive variance without the spread of the means",
        "likelihoods.py",
        "(self.scales.square() + (self.means - mean).square())",
        "(self.scales.square() + 0 * (self.means - mean).square())",
        "test_likelihoods",
    ),
    Bug(
        "attack through one theta",
        "predictive/posterior.py",
        "return _predict(self.model, self.thetas, x)",
        "return _predict(self.model, self.thetas[:1], x)",
        "test_identities_attacks",
    ),
    Bug(
        "KL of a few parameters",
        "posteriors.py",
        "squares = (scale.dot(scale) + self.mu.dot(self.mu))",
        "squares = (scale.dot(scale) + self.mu[-3:].dot(self.mu[-3:]))",
        "test_contracts",
    ),
    Bug(
        "KL has no pull on the scales",
        "posteriors.py",
        "scale, constant = self.scale, self.num_params",
        "scale, constant = self.scale.detach(), self.num_params",
        "test_identities_proactive",
    ),
    Bug(
        "KL has no pull on the means",
        "posteriors.py",
        "scale.dot(scale) + self.mu.dot(self.mu)) /",
        "scale.dot(scale) + self.mean.dot(self.mean)) /",
        "test_identities_proactive",
    ),
    Bug(
        "low-rank KL without the determinant of the factor",
        "posteriors.py",
        "variance.log().sum() + torch.linalg.slogdet(eye + inner)[1]",
        "variance.log().sum() + 0 * torch.linalg.slogdet(eye + inner)[1]",
        "test_model",
    ),
    Bug(
        "standard deviation exp(rho) in the draw, softplus(rho) in the KL",
        "posteriors.py",
        "return torch.addcmul(self.mu, self.scale, noise)",
        "return torch.addcmul(self.mu, self.rho.exp(), noise)",
        "test_identities_proactive",
    ),
    Bug(
        "N/B dropped from the bound",
        "objectives.py",
        "        scale = self.num_data / len(x)\n        kl = posterior.kl",
        "        scale = 1.0\n        kl = posterior.kl",
        "test_identities_proactive",
    ),
    Bug(
        "the gradient of the bound, not of its share",
        "training/steps.py",
        "-gain / total, parameters",
        "-gain, parameters",
        "test_training_parts",
    ),
    Bug(
        "importance-weighted bound without 1/K",
        "objectives.py",
        "return torch.logsumexp(log_p, dim=1) - math.log(log_p.shape[1])",
        "return torch.logsumexp(log_p, dim=1)",
        "test_identities_proactive",
    ),
    Bug(
        "the bounds are swapped",
        "objectives.py",
        'if self.bound == "surrogate":',
        'if self.bound != "surrogate":',
        "test_identities_proactive",
    ),
    Bug(
        "K channel samples share their noise",
        "objectives.py",
        "return _stacked([channel.sample(predict, x, y, generator=generator) for _ in draws])",
        "return _stacked([channel.sample(predict, x, y, generator=generator)] * len(draws))",
        "test_identities_proactive",
    ),
    Bug(
        "gradient flows through the attack unasked",
        "objectives.py",
        "with through_attacks() if self.through else torch.no_grad():\n            seen = thetas if self.through else thetas.detach()",
        "with through_attacks():\n            seen = thetas",
        "test_identities_proactive",
    ),
    Bug(
        "no gradient through the attack when asked",
        "objectives.py",
        "with through_attacks() if self.through else torch.no_grad():",
        "with torch.no_grad():",
        "test_identities_proactive",
    ),
    Bug(
        "TRADES divergence reversed",
        "objectives.py",
        "return self.beta * divergence(p, q)",
        "return self.beta * divergence(q, p)",
        "test_identities_limits",
    ),
    Bug(
        "clean TRADES scores the adversarial input",
        "objectives.py",
        'attacked if self.penalty.likelihood == "adversarial" else [clean] * len(attacked)',
        "attacked",
        "test_identities_limits",
    ),
    Bug(
        "logit pairing without the square",
        "objectives.py",
        "(clean.output - adversarial.output).square().sum(-1)",
        "(clean.output - adversarial.output).abs().sum(-1)",
        "test_identities_limits",
    ),
    Bug(
        "thetas redrawn between attack and likelihood",
        "objectives.py",
        "        return self.terms(model, posterior, thetas, x, x_adv, y, weight)",
        "        thetas = posterior.rsample(self.num_theta, generator=generator)\n        return self.terms(model, posterior, thetas, x, x_adv, y, weight)",
        "test_identities_proactive",
    ),
    Bug(
        "sigma squared",
        "channels/noise.py",
        "noise_like(x, generator), alpha=sigma)",
        "noise_like(x, generator), alpha=sigma**2)",
        "test_contracts",
    ),
    Bug(
        "density without its normaliser",
        "likelihoods.py",
        "- (log_scale + 0.5 * LOG_TWO_PI)",
        "- 0.5 * LOG_TWO_PI",
        "test_contracts",
    ),
    Bug(
        "mixture density without its weights",
        "channels/mixture.py",
        "math.log(w) + inner for w, part in gaussian for inner in part.log_weights",
        "inner for w, part in gaussian for inner in part.log_weights",
        "test_contracts",
    ),
    Bug(
        "labels dropped on the way to the attack",
        "channels/attack.py",
        "return self.attack(predict, x, y, generator=generator).detach()",
        "return self.attack(predict, x, None, generator=generator).detach()",
        "test_identities_limits",
    ),
    Bug(
        "mixture components tied to positions",
        "channels/mixture.py",
        "return offset, torch.randperm(num, generator=generator, device=device)",
        "return offset, torch.arange(num, device=device)",
        "test_identities_attacks",
    ),
    Bug(
        "mixture shares always rounded the same way",
        "channels/mixture.py",
        "u = float(offset)",
        "u = 0.999",
        "test_identities_attacks",
    ),
    Bug(
        "a shorter pass of draws weighs as a full one",
        "predictive/smoothing.py",
        "return means, scales, log_weights.reshape(num, batch)",
        "return means, scales, log_weights.reshape(num, batch) - math.log(count)",
        "test_smoothing",
    ),
    Bug(
        "smoothing noise depends on the batch",
        "predictive/smoothing.py",
        "noise = normal_like(x, generator, (_BLOCK, 1, *x.shape[1:]))",
        "noise = normal_like(x, generator, (_BLOCK, len(x), *x.shape[1:]))",
        "test_predictor_contract",
    ),
    Bug(
        "certificates use half of their alpha",
        "predictive/certification.py",
        "level=1 - alpha",
        "level=1 - alpha / 2",
        "test_identities_reactive",
    ),
    Bug(
        "a certificate's draws are used twice",
        "predictive/smoothing.py",
        "yield normal_like(x, generator, (min(size, num - start), *x.shape)), generator",
        "yield normal_like(x, torch.Generator().manual_seed(0), (size, *x.shape))[: num - start], generator",
        "test_identities_reactive",
    ),
    Bug(
        "a loader's N is its data set's",
        "training/batches.py",
        "else batches.sampler",
        "else loader.dataset",
        "test_loaders",
    ),
    Bug(
        "a loader's N forgets drop_last",
        "training/batches.py",
        "return num // batches.batch_size * batches.batch_size if batches.drop_last else num",
        "return num",
        "test_loaders",
    ),
    Bug(
        "a loader moves the global generator",
        "seeds.py",
        "_restore(self._before)",
        "pass",
        "test_loaders",
    ),
    Bug(
        "no gradient at the root of a used-up budget",
        "attacks/balls.py",
        "torch.where(inside, ratio.sqrt(), (left > 0).to(ratio.dtype))",
        "(left.clamp_min(0.0) / free.clamp_min(1e-38)).sqrt().clamp_max(1.0)",
        "test_through_box",
    ),
    Bug(
        "a direction of zeros has an infinite gradient",
        "attacks/balls.py",
        "return torch.where(size > 0, size, math.inf)",
        "return size.clamp_min(torch.finfo(size.dtype).tiny)",
        "test_through_box",
    ),
    Bug(
        "skipped steps are not told",
        "training/loop.py",
        "if not has_warned:",
        "if False:",
        "test_training",
    ),
    Bug(
        "a density's start is another than the samples'",
        "channels/attack.py",
        "generator = SharedStarts(len(x), x.device, seed)",
        "generator = torch.Generator(x.device).manual_seed(seed)",
        "test_channels",
    ),
    Bug(
        "a regression's own mean as its label",
        "channels/attack.py",
        "return mean + sd, mean - sd",
        "return mean, mean",
        "test_channels",
    ),
    Bug(
        "labels are drawn from one side",
        "channels/attack.py",
        "drawn(torch.rand, (len(x),), generator, device=x.device) < 0.5",
        "drawn(torch.rand, (len(x),), generator, device=x.device) < 2",
        "test_channels",
    ),
    Bug(
        "loss entries stay where they were",
        "channels/mixture.py",
        "loss_rows = order[places[start:stop]] if self._holds_rows else None",
        "loss_rows = torch.arange(start, stop) if self._holds_rows else None",
        "test_channels",
    ),
    Bug(
        "weights in the components' order, examples in the groups'",
        "channels/mixture.py",
        "math.fsum(self._ordered_weights[:k])",
        "math.fsum(self.weights[:k])",
        "test_channels",
    ),
    Bug(
        "other people's regressions broadcast (B, 1) targets",
        "adapters/models.py",
        "return gaussian_prediction(mean, scale, 1 if mean.ndim == 1 else mean.shape[1])",
        "return torch.distributions.Normal(mean, scale, validate_args=False)",
        "test_predictor_contract",
    ),
    Bug(
        "a prior over eps takes the edges of its quantiles",
        "channels/prior.py",
        "levels = (torch.arange(num, dtype=torch.float64) + 0.5) / num",
        "levels = (torch.arange(num, dtype=torch.float64) + 0.01) / num",
        "test_eps_prior",
    ),
    Bug(
        "a prior over eps forgets its weights",
        "channels/prior.py",
        "values, weights = list(eps), list(eps.values())",
        "values, weights = list(eps), [1.0 / len(eps)] * len(eps)",
        "test_eps_prior",
    ),
    Bug(
        "an estimator moves the global generator",
        "estimators.py",
        "nn.utils.skip_init(nn.Linear, len(bias), len(bias), dtype=bias.dtype)",
        "nn.Linear(len(bias), len(bias), dtype=bias.dtype)",
        "test_global_stream",
    ),
    Bug(
        "Adam climbs the loss",
        "training/steps.py",
        "parameter.grad = gradient",
        "parameter.grad = -gradient",
        "test_training",
    ),
    Bug(
        "the warm-up never ends",
        "training/loop.py",
        "if step < num_warm else 0.0",
        "if num_warm else 0.0",
        "test_training_parts",
    ),
    Bug(
        "a compiled warm-up does nothing",
        "accelerated/step.py",
        "self.spared.fill_(spared)",
        "self.spared.fill_(0.0)",
        "test_compiled",
    ),
    Bug(
        "the bound that is told is the warm-up's",
        "training/steps.py",
        "gain = terms.bound + spared * terms.kl if spared else terms.bound",
        "terms = terms._replace(bound=terms.bound + spared * terms.kl); gain = terms.bound",
        "test_training_parts",
    ),
    Bug(
        "images warm up at a table's rate",
        "runs/named.py",
        "if epochs is None and x.ndim == 2:",
        "if epochs is None:",
        "test_table_users",
    ),
    Bug(
        "learning rate never decays",
        "training/loop.py",
        "lr * decay ** (step / batches.steps_per_epoch)",
        "lr",
        "test_training",
    ),
    Bug(
        "a step that is not finite is taken",
        "training/steps.py",
        "if Taken(*numbers).is_finite():",
        "if True:",
        "test_training",
    ),
    Bug(
        "a compiled step that is not finite is taken",
        "accelerated/step.py",
        "tensor.copy_(torch.where(finite, value, tensor))",
        "tensor.copy_(value)",
        "test_compiled",
    ),
    Bug(
        "the same noise at every step",
        "training/loop.py",
        "return ranks.generator(seed_for(seed, purpose, step), num",
        "return ranks.generator(seed_for(seed, purpose, 0), num",
        "test_training",
    ),
    Bug(
        "every theta gets the first one's gradient",
        "model.py",
        "total += vjp_of(output, leaf, of_theta)",
        "total += vjp_of(output, leaf, cotangent[0])",
        "test_accelerated",
    ),
    Bug(
        "a convolution of something else is taken for one of x",
        "accelerated/passes.py",
        "if not is_plain or not is_x_itself or weight.requires_grad:",
        "if not is_plain or weight.requires_grad:",
        "test_accelerated",
    ),
    Bug(
        "patches are put together a pixel off",
        "accelerated/passes.py",
        "padded[:, :, down : down + height,",
        "padded[:, :, :height,",
        "test_accelerated",
    ),
    Bug(
        "x beside the first layer is forgotten",
        "accelerated/passes.py",
        "        total = vjp(cotangent)\n",
        "        total = vjp(cotangent).zero_()\n",
        "test_accelerated",
    ),
    Bug(
        "hooks are not called",
        "accelerated/passes.py",
        "return not hooked and (",
        "return (",
        "test_accelerated",
    ),
    Bug(
        "switched off, and still fast",
        "accelerated/__init__.py",
        "return not _is_disabled.get() and",
        "return",
        "test_accelerated",
    ),
    Bug(
        "rounding may leave the ball",
        "attacks/balls.py",
        "outside = self.norm(moved) > self.eps * (1 + 1e-6)",
        "outside = self.norm(moved) > self.eps * (1 + 1e6)",
        "test_attack_entries",
    ),
    Bug(
        "later blocks meet the first one's entries",
        "evaluation/measuring.py",
        "method = _keyed_sources(on_rows(attack, rows),",
        "method = _keyed_sources(on_rows(attack, slice(0, rows.stop - rows.start)),",
        "test_evaluation_scores",
    ),
    Bug(
        "the worst attack is chosen and reported on the same draws",
        "evaluation/scoring.py",
        "in (HALVES, HALVES[::-1]):",
        "in ((HALVES[0], HALVES[0]), (HALVES[1], HALVES[1])):",
        "test_evaluation_scores",
    ),
    Bug(
        "labels of another part of the batch",
        "predictive/posterior.py",
        "x[rows].detach(), y[rows])",
        "x[rows].detach(), y[: len(x[rows])])",
        "test_attacks",
    ),
    Bug(
        "parts in a mapping keep their ball",
        "attacks/parts.py",
        "return value if all(named[key] is value[key] for key in value) else named",
        "return value",
        "test_attack_parts",
    ),
    Bug(
        "twice the steps are as many queries",
        "attacks/parts.py",
        'WORK = ("steps", "num_steps", "queries", "num_queries", "rounds", "num")',
        'WORK = ("steps", "num_steps")',
        "test_attack_parts",
    ),
    Bug(
        "random points without the ball's scale",
        "attacks/balls.py",
        "self.within_reach(self._scaled(normal_like(x, generator)), x)",
        "self.within_reach(normal_like(x, generator), x)",
        "test_attack_parts",
    ),
    Bug(
        "a purifier's attacks are run on its controls",
        "auditing/case.py",
        " if applies_to(attack, predict)",
        "",
        "test_attack_parts",
    ),
    Bug(
        "a posterior is built before its shapes are checked",
        "store/nets.py",
        'raise StoreError(part, wanted, f"{shape}")',
        "pass",
        "test_store_bundle",
    ),
    Bug(
        "any number of layers",
        "store/kinds.py",
        'num += "kind" in node',
        "num += 0",
        "test_files_in_use",
    ),
    Bug(
        "layer settings of any type",
        "store/nets.py",
        "type(value) in (int, float)",
        "value is not ...",
        "test_files_in_use",
    ),
    Bug(
        "documents of any number of values in a bundle",
        "store/documents.py",
        "for data in documents for sign",
        "for data in documents[:1] for sign",
        "test_files_in_use",
    ),
    Bug(
        "a configuration edited after a kill goes on",
        "runs/training.py",
        'run.check_sealed(documents.get("config"), "checkpoint")',
        "pass",
        "test_files_in_use",
    ),
    Bug(
        "a refused table leaves its folder",
        "runs/folder.py",
        "folder.rmdir()",
        "pass",
        "test_files_in_use",
    ),
    Bug(
        "a saved regression answers in standardised units",
        "store/bundle.py",
        "means = self.scaling.inverse_target(prediction.means)",
        "means = prediction.means",
        "test_files_in_use",
    ),
    Bug(
        "raw rows reach the model as they are",
        "store/bundle.py",
        "self.predict(self.scaling.transform(rows))",
        "self.predict(rows)",
        "test_files_in_use",
    ),
    Bug(
        "control characters of a file reach the terminal",
        "checks.py",
        "char if char.isprintable() else",
        "char if True else",
        "test_files_in_use",
    ),
    Bug(
        "a living writer's file is taken for a dead one's",
        "store/files.py",
        "        except BlockingIOError:\n            return None\n",
        "        except BlockingIOError:\n            pass\n",
        "test_store_files",
    ),
    Bug(
        "a pipe for a lock",
        "store/files.py",
        "if not stat.S_ISREG(mode):",
        "if False:",
        "test_store_files",
    ),
    Bug(
        "an archive is not compared with what save writes",
        "store/archive.py",
        "range(0, max(size, len(packed)), _PIECE)",
        "range(0)",
        "test_store_bundle",
    ),
    Bug(
        "a download follows any redirection",
        "datasets/fetching.py",
        "with _OPENER.open(",
        "with urllib.request.urlopen(",
        "test_datasets",
    ),
    Bug(
        "a download without a deadline",
        "datasets/fetching.py",
        "if time.monotonic() > self.end:",
        "if False:",
        "test_datasets",
    ),
    Bug(
        "an archive may unpack to anything",
        "datasets/formats.py",
        "self.left -= len(piece)",
        "self.left -= 0",
        "test_datasets",
    ),
    Bug(
        "categories are in reach",
        "datasets/encoding.py",
        "name in self.movable)",
        "True)",
        "test_tables_as_they_come",
    ),
    Bug(
        "medians of all rows",
        "datasets/own.py",
        "Encoding.fit(columns, rows[train]",
        "Encoding.fit(columns, rows",
        "test_tables_as_they_come",
    ),
    Bug(
        "the training attacker moves what is masked",
        "runs/building.py",
        "mask = dataset.mask if mask is None else mask & dataset.mask",
        "pass",
        "test_tables_as_they_come",
    ),
    Bug(
        "fitted values of a transformer are forgotten",
        "store/preprocessing.py",
        "setattr(leaf, name, value)",
        "pass",
        "test_preprocessing",
    ),
    Bug(
        "a saved purifier answers without purifying",
        "estimators.py",
        'estimator._purify(trained_on, _Reference(channel=loaded.channel, **kept["reference"]))',
        "pass",
        "test_saved_estimators",
    ),
    Bug(
        "a saved estimator draws other thetas",
        "estimators.py",
        "posterior=Samples(last.thetas_)",
        "posterior=Samples(last.posterior_.sample(len(last.thetas_)))",
        "test_saved_estimators",
    ),
    Bug(
        "class weights are ignored",
        "objectives.py",
        "if self.class_weight is None:",
        "if True:",
        "test_class_weight",
    ),
    Bug(
        "a child gives its parent's lock away",
        "store/files.py",
        "if pid == os.getpid():",
        "if True:",
        "test_store_files",
    ),
    Bug(
        "the learned adversary helps",
        "training/loop.py",
        "torch.autograd.grad(-gain",
        "torch.autograd.grad(gain",
        "test_training",
    ),
    Bug(
        "signals raise inside imports",
        "cli/signals.py",
        "if importing(frame) and not late:",
        "if False:",
        "test_signals",
    ),
    Bug(
        "the console program does not take over signals",
        "cli/__init__.py",
        "        take_over()\n",
        "        pass\n",
        "test_signals",
    ),
    Bug(
        "the demo catches Ctrl-C as training does",
        "cli/signals.py",
        "numbers = NUMBERS if _console else (signal.SIGTERM,)",
        "numbers = (signal.SIGTERM,)",
        "test_signals",
    ),
    Bug(
        "escapes reach the terminal",
        "checks.py",
        "else ascii(c)[1:-1] for c in text",
        "else c for c in text",
        "test_screen",
    ),
    Bug(
        "out of memory is called a bug",
        "cli/app.py",
        "if (wanted := memory_wanted(error)) is not None:",
        "if (wanted := None) is not None:",
        "test_screen",
    ),
    Bug(
        "a 90 % interval is an 80 % one",
        "cli/predicting.py",
        "0.5 + sign * level / 2",
        "0.5 + sign * (level - 0.1) / 2",
        "test_readback",
    ),
    Bug(
        "intervals of a normal with the same moments",
        "cli/predicting.py",
        "metrics.quantile(prediction, 0.5",
        "metrics.quantile(torch.distributions.Normal(prediction.mean, prediction.variance.sqrt()), 0.5",
        "test_readback",
    ),
    Bug(
        "errors on the terminal in standard deviations",
        "cli/describe.py",
        'of {name})", float(spread))',
        'of {name})")',
        "test_readback",
    ),
    Bug(
        "errors in the report in standard deviations",
        "report/telling.py",
        "return float(spread[0]) if spread",
        "return 1.0 if spread",
        "test_readback",
    ),
    Bug(
        "the report shows the lower edge twice",
        "report/telling.py",
        'for end in ("low", "high"))\n    return',
        'for end in ("low", "low"))\n    return',
        "test_readback",
    ),
    Bug("the seed of an attack is ignored", "cli/attack.py", "seed=seed", "seed=0", "test_options"),
    Bug(
        "the run's norm whatever is asked for",
        "runs/trained.py",
        "make_ball(norm or self.norm, eps,",
        "make_ball(self.norm, eps,",
        "test_options",
    ),
    Bug(
        "the estimator's weight of the KL is ignored",
        "estimators.py",
        "kl_weight=self.kl_weight",
        "kl_weight=1.0",
        "test_options",
    ),
    Bug(
        "experiments: the identity of SM-5's mixtures without its noise",
        "experiments/defenses.py",
        "[weight, 1 - weight], [Noise(config.sigma), attacked(config, data)]",
        "[weight, 1 - weight], [Noise(0.0), attacked(config, data)]",
        "test_experiments",
    ),
    Bug(
        "experiments: best with too few seeds",
        "experiments/scores.py",
        "len(self.seeds(row)) >= MIN_SEEDS]",
        "len(self.seeds(row)) >= 2]",
        "test_experiments",
    ),
    Bug(
        "experiments: what is collected is done again",
        "experiments/running.py",
        '        units |= manifest["units"]\n',
        "",
        "test_experiments",
    ),
    Bug(
        "experiments: validation rows stay in training",
        "experiments/units.py",
        "x_train=data.x_train[train], y_train=data.y_train[train])",
        "x_train=data.x_train, y_train=data.y_train)",
        "test_experiments",
    ),
    Bug(
        "metrics: the paired t-test forgets that splits overlap",
        "metrics/comparison.py",
        "math.sqrt(1 / num + overlap)",
        "math.sqrt(1 / num)",
        "test_experiments",
    ),
    Bug(
        "an estimator's 90 % interval is an 80 % one",
        "estimators.py",
        "(0.5 - level / 2, 0.5 + level / 2)",
        "(0.55 - level / 2, 0.45 + level / 2)",
        "test_estimators_complete",
    ),
    Bug(
        "raw budgets taken for standardised ones",
        "estimators.py",
        'spread if self.units == "standardised" else None',
        "spread",
        "test_estimators_complete",
    ),
    Bug(
        "the reactive defense does not purify",
        "estimators.py",
        'if self.defense in ("reactive", "both"):',
        "if False:",
        "test_estimators_complete",
    ),
    Bug(
        "the robust scorer does not attack",
        "estimators.py",
        "last.predictor_, x_adv, target,",
        "last.predictor_, x, target,",
        "test_estimators_complete",
    ),
    Bug(
        "fixed features may be changed",
        "runs/building.py",
        "name not in fixed for name in names",
        "True for name in names",
        "test_options",
    ),
    Bug(
        "purifier: leading terms keep their rounding",
        "purification/sweep.py",
        "if bank.has_centres and query.dtype != torch.float64:",
        "if bank.has_centres and query.dtype == torch.float16:",
        "test_purifier",
    ),
    Bug(
        "purifier: leading terms counted twice in the gradient",
        "purification/sweep.py",
        "_set_leading(terms, part, groups, rows, pick, None)",
        "pass",
        "test_purifier_same_answer",
    ),
    Bug(
        "purifier: float32 products at any spread",
        "purification/purifier.py",
        "amax(0) > _TOLERATED",
        "amax(0) > 1e9",
        "test_purifier_same_answer",
    ),
    Bug(
        "purifier: rows of two precisions in the order of their blocks",
        "purification/purifier.py",
        "torch.cat(places).argsort()",
        "torch.cat(places)",
        "test_purifier_same_answer",
    ),
    Bug(
        "purifier: a bank's weights forget its share",
        "purification/sweep.py",
        "scale = share / part.total  #",
        "scale = 1 / part.total.expand_as(share)  #",
        "test_purifier_same_answer",
    ),
    Bug(
        "purifier: terms that lead no more are lost",
        "purification/sweep.py",
        'rest = rest + torch.einsum("gbk,gbkw->gbw", lesser, both.values)',
        "rest = rest.double()",
        "test_purifier_same_answer",
    ),
    Bug(
        "purifier: annealed climbs a margin of no classes",
        "purification/attacks.py",
        "(nll if purifier.store.num_outputs else margin)",
        "margin",
        "test_purifier_everywhere",
    ),
    Bug(
        "purifier: quantiles of another level",
        "purification/regression.py",
        "level = torch.as_tensor(value,",
        "level = 0.98 * torch.as_tensor(value,",
        "test_purifier_everywhere",
    ),
    Bug(
        "purifier: saved tables are not hashed when read",
        "store/parts.py",
        "            digest.update(piece)\n        files.check_digest(file, part.sha256, digest.hexdigest())",
        "            digest.update(piece)",
        "test_purifier_saving",
    ),
    Bug(
        "purifier: a save drops the parts that it shares with the last",
        "store/parts.py",
        "before - {part.file for part in described} - {_MANIFEST}",
        "before",
        "test_purifier_saving",
    ),
    Bug(
        "purifier: no space is reserved",
        "store/files.py",
        "                os.posix_fallocate(descriptor, 0, reserve)",
        "                pass",
        "test_purifier_saving",
    ),
    Bug(
        "purifier: predictions in a file are not looked at",
        "purification/saving.py",
        "not bool(torch.isfinite(block).all()) or not bool((positive > 0).all())",
        "False",
        "test_purifier_saving",
    ),
    Bug(
        "displaced centre: nothing is taken off",
        "auditing/remembering.py",
        "[: int(ALLOWED * len(broken))]",
        "[:0]",
        "test_audit_rules",
    ),
    Bug(
        "displaced centre: the centre stays",
        "auditing/remembering.py",
        "eps=0.5 * case.ball.eps",
        "eps=0.0 * case.ball.eps",
        "test_zoo",
    ),
    Bug(
        "order: the copy is the original",
        "auditing/copies.py",
        "return Copies(lambda: cast(Predictor, copied(unasked, dict(shared))))",
        "return Copies(lambda: predict)",
        "test_audit_rules",
    ),
    Bug(
        "order: the point half-way is never asked about",
        "auditing/remembering.py",
        "        if between:\n            predict((one + other) / 2)\n",
        "",
        "test_audit_escapes test_zoo",
    ),
    Bug(
        "noise: points on the way to others are tried and forgotten",
        "auditing/strength.py",
        "return judged(broken > POINT or missed, advice, **figures)",
        "return judged(broken > POINT, advice, **figures)",
        "test_audit_escapes test_zoo",
    ),
    Bug(
        "a claim may attack another predictor than it scores",
        "auditing/others.py",
        "return _enough_in_claim(case) if case.is_bayesian else _through_itself(case)",
        "return _enough_in_claim(case)",
        "test_audit_escapes test_zoo",
    ),
    Bug(
        "control: any ball will do",
        "auditing/controls.py",
        "if wide := _too_wide(case, control):",
        'if wide := "":',
        "test_audit_escapes test_zoo",
    ),
    Bug(
        "a generator of its own makes a memory",
        "auditing/remembering.py",
        "if not case.can_be_fixed or changed(unasked, unasked, clean, case).any():",
        "if changed(unasked, unasked, clean, case).any():",
        "test_audit_escapes",
    ),
    Bug(
        "order: clean answers are not repeated",
        "auditing/remembering.py",
        "again = changed(unasked, asked, clean, case)",
        "again = changed(unasked, unasked, clean, case)",
        "test_audit_rules",
    ),
    Bug(
        "silent success: balls that meet are taken for apart",
        "auditing/strength.py",
        "= 2.001 * case.ball.eps",
        "= 0.001 * case.ball.eps",
        "test_audit_first_contact",
    ),
    Bug(
        "silent success: no iterate is seen",
        "auditing/strength.py",
        "inside = self.case.ball.contains(x.detach()[point], self.x[example])",
        "inside = torch.zeros_like(point, dtype=torch.bool)",
        "test_audit_first_contact",
    ),
    Bug(
        "a quick look at a black box takes as long as a whole one",
        "auditing/case.py",
        "blind_queries=500,\n",
        "",
        "test_audit_first_contact",
    ),
    Bug(
        "a claim's units are taken for raw",
        "auditing/run.py",
        "if case.claim is None and case.ball.scale is None and model.scale is None:",
        "if case.ball.scale is None and model.scale is None:",
        "test_audit_first_contact",
    ),
    Bug(
        "convolutions of few pixels run theta by theta",
        "accelerated/passes.py",
        "(is_small or not _is_convolutional(model))",
        "(not _is_convolutional(model))",
        "test_audit_first_contact",
    ),
    Bug(
        "claims: worst compared by its mean alone",
        "auditing/describing.py",
        "better = int((claimed > union + doubt + 1e-9).sum())",
        "better = int(claimed.mean() > union.mean())",
        "test_audit_rules",
    ),
    Bug(
        "claims: the hash of the test set is not compared",
        "auditing/describing.py",
        "claim.test_hash != data_hash(*case.whole)",
        "claim.test_hash is None",
        "test_audit_rules",
    ),
    Bug(
        "level A under only",
        "auditing/certificate.py",
        "Smoothed() as smoothed if only is None:",
        "Smoothed() as smoothed if only != ():",
        "test_audit_certificate",
    ),
    Bug(
        "certified again: a stretch of a tenth is let through",
        "auditing/certificate.py",
        "excess = said - new.radii.cpu()",
        "excess = said / 1.1 - new.radii.cpu()",
        "test_audit_certificate",
    ),
    Bug(
        "own radius: everybody is attacked at eps",
        "auditing/certificate.py",
        "radii = claimed.radii[rows].to(x).unsqueeze(1)",
        "radii = torch.full_like(x[:, :1], case.ball.eps)",
        "test_audit_certificate",
    ),
    Bug(
        "own radius: the few draws decide",
        "auditing/certificate.py",
        "broken[row] = upper < 0.5",
        "broken[row] = True",
        "test_audit_certificate",
    ),
    Bug(
        "control: clean accuracy is not compared",
        "auditing/controls.py",
        "if abs(clean - defended) > NEAR + 1e-9:",
        "if abs(clean - defended) > 1:",
        "test_audit_rules",
    ),
    Bug(
        "control: averaging passes",
        "auditing/controls.py",
        "if num_different(control) > 1 or is_stochastic(control, case.x[:8]):",
        "if is_stochastic(control, case.x[:8]):",
        "test_audit_rules",
    ),
    Bug(
        "baseline: a record of another ball passes",
        "auditing/controls.py",
        "if not record.is_of(case.support.dataset, case.ball) and case.support.published is None:",
        "if not record.dataset:",
        "test_audit_rules",
    ),
    Bug(
        "black box: the queries are the budget's",
        "auditing/others.py",
        "queries = steps_of(attack)",
        "queries = max(5000, case.budget.queries)",
        "test_audit_rules",
    ),
    Bug(
        "saved evaluation: other data pass",
        "auditing/describing.py",
        "if not there <= here and not here <= there:",
        "if not there and not here:",
        "test_audit_rules",
    ),
    Bug(
        "black-box mode for masked gradients",
        "auditing/run.py",
        "black_box=blind and all(isinstance(attack, ANSWERS_ALONE) for attack in chosen.values()),",
        "black_box=blind,",
        "test_audit_rules",
    ),
    Bug(
        "audit: the worst of noise is chosen and reported on the same draws",
        "evaluation/measuring.py",
        "halves=repeats > 1",
        "halves=False",
        "test_audit_rules",
    ),
    Bug(
        "audit: a dagger where nothing failed",
        "evaluation/result.py",
        "bool(verdict.failed_mandatory)",
        'verdict.level != "B"',
        "test_audit_rules",
    ),
    Bug(
        "purifier: an index's cells have no radius",
        "purification/index.py",
        "near = torch.maximum(distance - self.radii, along)",
        "near = torch.maximum(distance, along)",
        "test_purifier_index",
    ),
    Bug(
        "purifier: an index takes the far edge of a cell",
        "purification/index.py",
        "edge = (away @ towards.T).amin(0)",
        "edge = (away @ towards.T).amax(0)",
        "test_purifier_index",
    ),
    Bug(
        "purifier: an index takes the plane between centroids for a centroid",
        "purification/index.py",
        "/ length + length",
        "/ length + 2 * length",
        "test_purifier_index",
    ),
    Bug(
        "purifier: an index visits the first cells alone",
        "purification/index.py",
        "visited.append(seen | (more & worthwhile.unsqueeze(1)))",
        "visited.append(seen)",
        "test_purifier_index",
    ),
    Bug(
        "purifier: an index forgets what lies behind the last centre",
        "purification/index.py",
        "torch.where(seen, torch.maximum(each, farther.unsqueeze(1)), each)",
        "torch.where(seen, math.inf, each)",
        "test_purifier_index",
    ),
    Bug(
        "purifier: an index denoises by the thetas' shares alone",
        "purification/purifier.py",
        "factor = of_bank * shares / part.total",
        "factor = shares / part.total",
        "test_purifier_index",
    ),
    Bug(
        "purifier: a query that all exclude has eight reference points",
        "purification/sweep.py",
        "terms.masked_fill_(excluded, math.exp(_LEAST[torch.float64]))",
        "pass",
        "test_purifier",
    ),
    Bug(
        "decisions: the components of a mixture count alike",
        "predictive/decisions.py",
        "weights = (log_weights.exp() / size).expand_as(y)",
        "weights = torch.full_like(y, 1.0 / (size * len(means)))",
        "test_decisions_and_conformal",
    ),
    Bug(
        "decisions: a Gaussian is cut into halves, whatever is asked for",
        "predictive/decisions.py",
        "size = max(-(-num // len(means)), min(num, _LEAST))",
        "size = 2",
        "test_decisions_and_conformal",
    ),
    Bug(
        "decisions: draws do not move with their prediction",
        "predictive/decisions.py",
        "y = mean + spread * away",
        "y = mean.detach() + spread.detach() * away",
        "test_decisions_and_conformal",
    ),
    Bug(
        "ranks: gradients are added, not averaged",
        "distributed.py",
        "for tensor in tensors]) * weight)",
        "for tensor in tensors]))",
        "test_distributed",
    ),
    Bug(
        "ranks: each draws its noise from the head of the batch's",
        "seeds.py",
        "generator=whole, **options)[rows]",
        "generator=whole, **options)[: len(rows)]",
        "test_distributed",
    ),
    Bug(
        "ranks: a rank without rows of a mixture's part does not draw",
        "channels/mixture.py",
        "if stop == start and end > begin and noise is None:",
        "if False:",
        "test_distributed",
    ),
    Bug(
        "ranks: thetas differ from rank to rank",
        "seeds.py",
        "case Share(own_thetas=True):",
        "case Share():",
        "test_distributed",
    ),
    Bug(
        "ranks: the purifier's gradient is this rank's alone",
        "purification/sweep.py",
        "return ctx.store.ranks.sum(gradient), None",
        "return gradient, None",
        "test_distributed",
    ),
    Bug(
        "ranks: the purifier weighs all ranks alike",
        "purification/sweep.py",
        "part = (log_total - level).exp().masked_fill",
        "part = torch.ones_like(level).masked_fill",
        "test_distributed",
    ),
    Bug(
        "ranks: a silent one is waited for",
        "distributed.py",
        "if silent:",
        "if False:",
        "test_distributed",
    ),
    Bug(
        "threads forget that no gradient is wanted",
        "accelerated/passes.py",
        "pool.map(with_gradients(work), slices)",
        "pool.map(work, slices)",
        "test_accelerated",
    ),
    Bug(
        "threads forget autocast",
        "accelerated/passes.py",
        'or torch.is_autocast_enabled("cpu")',
        "or False",
        "test_accelerated",
    ),
    Bug(
        "labels that an attack draws reach the learned channel beside it",
        "channels/mixture.py",
        "targets = labels if isinstance(self.channels[members[0]], AttackChannel) else y",
        "targets = labels",
        "test_channels",
    ),
    Bug(
        "class weights do not reach the penalty",
        "objectives.py",
        "omega = omega if weight is None else omega * weight",
        "omega = omega if weight is None or self.class_weight else omega * weight",
        "test_class_weight",
    ),
    Bug(
        "the adversary sees rows of no weight",
        "training/loop.py",
        "gain = gain if weight is None else gain * weight",
        "gain = gain",
        "test_sample_weight",
    ),
    Bug(
        "steps take the dtype that the predictor answers in",
        "attacks/balls.py",
        "return per_row(value.to(like.dtype), like)",
        "return per_row(value, like)",
        "test_attack_entries",
    ),
    Bug(
        "attacks take labels of 64 bits alone",
        "attacks/gradients.py",
        "return y if y.dtype == torch.bool else y.long()",
        "return y",
        "test_attack_entries",
    ),
    Bug(
        "quantiles of a Beta end with its bell",
        "channels/prior.py",
        "- reach - 50 / a, math.log(a / b) + reach + 50 / b",
        "- reach, math.log(a / b) + reach",
        "test_eps_prior",
    ),
    Bug(
        "sweeps: a failure is told at once",
        "experiments/running.py",
        "elif unit in failed:",
        "elif unit:",
        "test_sweeps",
    ),
)


class InOrder:
    """A plugin: these tests alone, in this order."""

    def __init__(self, names: Iterable[str]) -> None:
        self.places = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.places]
        items.sort(key=lambda item: self.places[item.nodeid])


def first_failure(tree: Path, chosen: Sequence[str]) -> str | None:
    """Run pytest over the chosen files or tests in a fork, in that tree: the first test that fails."""
    named = [name for name in chosen if "::" in name]
    files = dict.fromkeys(name.split("::")[0] for name in chosen)
    plugins = [InOrder(named)] if len(named) == len(chosen) else []
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = f"{tree / 'src'}:{tree}"
            sys.path[:] = [str(tree / "src"), str(tree), *(p for p in sys.path if p != str(ROOT))]
            sys.dont_write_bytecode = True
            code = 70  # what only a crash of pytest itself leaves
            options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
            try:
                code = int(pytest.main([*options, *files], plugins=plugins))
            finally:
                sys.stdout.flush()
                os._exit(code)
        deadline = time.monotonic() + 10 * SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "no end"
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if failed:
        return failed.group(1).removeprefix("tests/")
    return None if code in (0, 4, 5) else f"collection ({code})"  # 4 and 5: no such test any more


def copied(tree: Path) -> None:
    """All that the tests read, without copying a byte."""
    kept_out = shutil.ignore_patterns(".git", ".venv", ".reach", "*_cache", "__pycache__", "_build")
    shutil.copytree(ROOT, tree, ignore=kept_out, copy_function=os.link)


def run(bug: Bug, last: dict[str, str], first: bool, reach: Reach | None) -> dict[str, Any]:
    """Plant the bug in a copy and run the tests until one fails."""
    began = time.monotonic()
    row: dict[str, Any] = {"bug": bug.name, "file": bug.file, "caught_by": None}
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        tree = Path(folder) / "tree"
        copied(tree)
        path = tree / "src" / "advbayes" / bug.file
        text = path.read_text()
        if bug.old not in text:
            return {**row, "note": "the line to change is not there"}
        path.unlink()  # a link to the file itself
        path.write_text(text.replace(bug.old, bug.new, 1))
        named = bug.tests.split()
        steps = (
            [named] if first or reach else [named, [name for name in TESTS if name not in named]]
        )
        runs = [[f"tests/{name}.py" for name in names] for names in steps]
        if reach is not None:
            runs.insert(0, within(reach.tests(bug.file, bug.old), reach.seconds))
        if "::" in last.get(bug.name, ""):
            runs.insert(0, [last[bug.name]])
        for chosen in runs:
            row["caught_by"] = first_failure(tree, chosen) if chosen else None
            if row["caught_by"]:
                break
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def within(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """As many of them, from the first on, as are expected to end in time."""
    ends = itertools.accumulate(seconds.get(name, 0.0) for name in tests)
    return [name for name, end in zip(tests, ends, strict=True) if end < SECONDS / 2]


def record(name: str, command: str, title: str, rows: list[dict[str, Any]]) -> None:
    """Write the table and the rows behind it."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    caught = sum(row["caught_by"] is not None for row in rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        "commit": commit,
        "caught": caught,
        "planted": len(rows),
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    table = "\n".join(
        f"| {row['bug']} | `{row['file']}` | {row['caught_by'] or '**not caught**'} |"
        for row in rows
    )
    (RESULTS / f"{name}.md").write_text(
        f"# {title}\n\n{caught} of {len(rows)} caught, at commit {commit} (`{command}`).\n\n"
        f"| bug | planted in | caught by |\n|---|---|---|\n{table}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant deliberate bugs; the tests must notice.")
    parser.add_argument("pattern", nargs="?", default="", help="only bugs with this in their name")
    parser.add_argument("--slips", action="store_true", help="the list of tests/slips.py")
    parser.add_argument("--first", action="store_true", help="only the test files named with a bug")
    parser.add_argument("--reach", action="store_true", help="all tests that run the line changed")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    for heavy in ("torch", "torch.distributions", "numpy", "scipy.stats", "sklearn", "pytest"):
        importlib.import_module(heavy)

    name, bugs = "mutations", BUGS
    if asked.slips:
        name, bugs = "slips", importlib.import_module("tests.slips").SLIPS
    chosen = [bug for bug in bugs if asked.pattern in bug.name]
    before = RESULTS / f"{name}.json"
    rows = json.loads(before.read_text())["rows"] if before.exists() else []
    last = {row["bug"]: f"tests/{row['caught_by']}" for row in rows if row["caught_by"]}

    rows = []
    reach = Reach() if asked.reach else None
    with multiprocessing.get_context("fork").Pool(asked.workers) as pool:
        for row in pool.imap(partial(run, last=last, first=asked.first, reach=reach), chosen):
            rows.append(row)
            found = row["caught_by"] or f"NOT CAUGHT {row.get('note', '')}"
            print(f"{len(rows):3}/{len(chosen)}  {row['bug']}: {found}", flush=True)
    where = {row["caught_by"] for row in rows if "::" in (row["caught_by"] or "")}
    while where and (wrong := first_failure(ROOT, [f"tests/{test}" for test in where])):
        print(f"{wrong} fails on the package as it is: it catches nothing")
        where.discard(wrong)
        for row in rows:
            if row["caught_by"] == wrong:
                row["caught_by"] = None
    caught = sum(row["caught_by"] is not None for row in rows)
    print(f"{caught} of {len(rows)} caught")
    if not asked.pattern and not asked.first:
        command = "python tests/mutations.py" + " --slips" * asked.slips + " --reach" * asked.reach
        record(name, command, "Slips by another hand" if asked.slips else "Deliberate bugs", rows)
    return 0 if caught >= len(rows) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
