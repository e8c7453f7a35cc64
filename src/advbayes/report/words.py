"""What metrics, levels and defenses mean, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from advbayes.auditing import Verdict, is_first_look


@dataclass(frozen=True)
class Metric:
    """A column of the tables."""

    label: str
    meaning: str
    better: str  # "higher", "lower" or "near"
    share: bool = False


METRICS = {
    "accuracy": Metric("Accuracy", "share of examples answered correctly", "higher", share=True),
    "rmse": Metric("RMSE", "root of the mean squared error", "lower"),
    "nll": Metric("NLL", "negative log-probability of the truth, in nats", "lower"),
    "brier": Metric("Brier", "squared distance of the probabilities from the truth", "lower"),
    "ece": Metric(
        "ECE", "expected calibration error: mean gap between confidence and accuracy", "lower"
    ),
    "crps": Metric("CRPS", "distance of the predictive distribution from the truth", "lower"),
    "coverage": Metric(
        "Coverage", "share of truths inside the predicted interval", "near", share=True
    ),
    "selective_accuracy": Metric(
        "Selective accuracy", "accuracy on the half it is most certain of", "higher", share=True
    ),
    "aurc": Metric(
        "AURC", "mean risk over all shares of answered questions, most certain first", "lower"
    ),
}
MAIN = {"classification": "accuracy", "regression": "rmse"}

LEVELS = {
    "A": (
        "Certified",
        "A certificate bounds what any attack within the budget can do, and no attack that was "
        "tried contradicts it. The numbers can be relied on.",
    ),
    "B": (
        "Every mandatory check passed",
        "The attacks were sound, strong enough and converged by every mandatory check. The numbers "
        "under attack can be believed as good estimates; they are not a proof, and a better attack "
        "may still be found.",
    ),
    "C": (
        "All checks ran, and some failed",
        "At least one check shows that the attacks or the reporting are not good enough, so the "
        "true robustness may be lower than what is printed. Do not rely on the numbers marked † "
        "until the failed checks are mended.",
    ),
    "D": (
        "Some checks did not run",
        "A check that did not run never counts as passed, so nothing is known about what it would "
        "have found. Treat the numbers marked † as the best to hope for until the audit is "
        "complete.",
    ),
}
FIRST_LOOK = (
    "None of the {passed} checks that ran failed, and {missing} were left out for the sake of "
    "speed: a first look, not yet a verdict. The tier standard runs them all."
)
PARTIAL = (
    "Only part of the audit was asked for",
    "The checks that ran say level {level}, but {missing} mandatory checks were never asked for, "
    "and a check that did not run never counts as passed. Treat the numbers marked † as the best "
    "to hope for until the audit is complete.",
)
UNAUDITED = (
    "Not audited",
    "Nobody has checked whether the attacks were strong enough. Numbers under attack are the best "
    "to hope for: treat those marked † as not known.",
)

DEFENSES = {
    "none": "without any adversary in training",
    "noise": "through Gaussian noise on the inputs",
    "consistency": "through Gaussian noise on the inputs, with a penalty where its draws disagree",
    "at": "by adversarial training (half of each batch under a one-step attack)",
    "os": "through a one-step attack followed by noise",
    "os50": "through a one-step attack followed by noise, on half of each batch",
    "mix": "through a mixture of noise and one-step attacks on different losses, each followed by "
    "noise",
    "pgd": "through an iterated gradient attack followed by noise",
    "trades": "with the TRADES penalty between clean and attacked predictions",
    "alp": "with adversarial logit pairing",
    "nn": "against a learned adversary",
    "nn50": "against a learned adversary, on half of each batch",
}
POSTERIORS = {
    "mean_field": "a mean-field Gaussian posterior",
    "point": "a single point estimate",
    "ensemble": "an ensemble",
    "low_rank": "a low-rank Gaussian posterior",
}
NORMS = {
    "l2": ("L2", "the Euclidean length of the whole change"),
    "linf": ("L∞", "the largest change of any single feature"),
}
TRIVIAL = {
    "uniform": "gives every class the same probability; accuracy as expected of a guess",
    "majority": "always answers the most frequent class, or one of them by chance",
    "constant": "always answers the training mean and spread",
}
KNOWLEDGE = {
    "thetas known": "the network, and the very parameter draws that answer",
    "thetas fresh": "the network and the posterior, but not the parameter draws that answer",
    "thetas known and fresh": "tried both with the very parameter draws that answer and with "
    "fresh ones",
    "no thetas": "the whole predictor (it has no random parameters)",
}


def norm_name(norm: object) -> str:
    """How a norm is written.

    >>> norm_name("Linf"), norm_name("other")
    ('L∞', 'other')
    """
    return NORMS.get(str(norm).lower(), (str(norm), ""))[0]


def sentence(verdict: Verdict) -> str:
    """What a verdict's level means, in one or two plain sentences.

    >>> from advbayes.auditing import Finding
    >>> sentence(Verdict((Finding("E1", "", "passed"), Finding("E6", "", "not run")), "quick"))[:34]
    'None of the 1 checks that ran fail'
    """
    if is_first_look(verdict.level, verdict.tier, len(verdict.failed)):
        passed = sum(finding.status == "passed" for finding in verdict.findings)
        return FIRST_LOOK.format(passed=passed, missing=len(verdict.not_run))
    return LEVELS[verdict.level][1].replace(" marked †", "")
