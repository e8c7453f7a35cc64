"""Controls: an undefended net must fall (E20), adversarial training must stand (E21). Given,
recorded or trained here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from advbayes import metrics
from advbayes.attacks import pgd
from advbayes.attacks.balls import Ball
from advbayes.auditing.case import Case, layers_of, num_different
from advbayes.auditing.findings import Finding, check, judged, no_attacks, not_applicable, not_run
from advbayes.auditing.strength import SIGNIFICANT, breaks_more
from advbayes.auditing.support import Baseline, Support, published_for, recorded_for
from advbayes.channels import AttackChannel, Noise
from advbayes.evaluation.inputs import as_tensors, is_stochastic
from advbayes.evaluation.scoring import Columns, worst
from advbayes.likelihoods import predicts_classes
from advbayes.model import BayesianModel
from advbayes.posteriors import PointMass
from advbayes.predictive import PosteriorPredictive
from advbayes.seeds import generator_for, seed_for
from advbayes.training import fit
from advbayes.types import Channel, Predictor

LEFT, NEAR = 0.05, 0.03  # E20: what the control may keep; how near its clean accuracy must be
BEHIND = 0.05  # E21: how far below its published figure the recipe may be
# E21, where no figure is published: what the control keeps where the baseline is compared to it,
# at most (where nothing stands there is nothing to compare); how far ahead the baseline must be
# (undefended nets of different seeds are up to five points apart)
FEW, AHEAD = 0.2, 0.05
GROWTH = 2.0**0.5  # of the control ball, where Support has none
HALVINGS = 3  # of that factor, down to 4 %, where baseline and control are compared
CHECKED = 20  # times that a control's clean accuracy is looked at while it trains
# examples, at least, on which baseline and control are compared (where there are as many)
COMPARED = 512
ALL = 2000  # examples on which clean accuracies are compared
BRITTLE = 0.25  # of what it gets right: what a control keeps, at least, under noise of its ball
TRIVIAL = (
    "the baseline is no better on clean data than the most frequent class (in regression the "
    "mean), which no attack can change: give one that has learnt something"
)
# how controls are trained: passes, at least so many steps of Adam, examples in each, its rate;
# the steps of the attack in adversarial training
EPOCHS, UPDATES, BATCH, RATE, ATTACK_STEPS = 4, 400, 128, 5e-3, 5
SMALLEST = 1 / 8  # of the audited eps, down to which adversarial training is tried


@check("E20", "undefended control", cost=lambda case: 3 * case.passes * (case.sources > 0))
def undefended_control(case: Case) -> Finding:
    """E20: the same attack leaves an undefended deterministic net at most 5 %."""
    control = case.support.undefended
    if case.task == "regression":
        return not_applicable("regression has no accuracy")
    if control is None or not case.attacks_on(control):
        return not_run(
            "give Support(undefended=...) (--undefended RUN) or Support(training=(x, y)), and the "
            "attacks"
        )
    right, audited = (clean_answers(each, case) for each in (control, case.predict))
    clean, defended = (float(each.double().mean()) for each in (right, audited))
    figures: dict[str, Any] = {"clean": clean, "clean_audited": defended}
    unfit = _unfit(control, case)
    if abs(clean - defended) > NEAR + 1e-9:
        differ = is_ahead(right, audited, NEAR) or is_ahead(audited, right, NEAR)
        if not unfit and not differ:
            return not_run(
                f"{len(right)} examples are too few to tell whether the clean accuracies of "
                f"control ({clean:.3f}) and audited model ({defended:.3f}) are within 3 points"
            )
        unfit.append(
            f"its clean accuracy must be within 3 points of the audited model's, {clean:.3f} is "
            f"not within {defended:.3f}"
        )
    if unfit:
        return judged(True, f"this is no control: {'; '.join(unfit)}", **figures)
    if wide := _too_wide(case, control):
        return not_run(wide)
    ball, columns = _control(case, control)
    left = case.value(columns)
    generator = generator_for(case.seed, "audit/control noise", device=case.x.device)
    noisy = ball.sphere(case.x, generator=generator)
    kept = case.value(case.scored(noisy, "noise", by=control))
    if left <= LEFT and kept < BRITTLE * clean:
        return not_run(
            f"the control keeps {kept:.3f} under noise of eps = {ball.eps:g}: whatever falls to "
            f"noise says nothing of an attack"
        )
    figures |= {"accuracy": left, "eps": float(ball.eps), "eps_of_distance": ball.eps / apart(case)}
    advice = (
        "an attack that leaves the undefended model standing says nothing about the defended one"
    )
    if left > LEFT and case.support.control_ball is None:
        advice += "; where a larger ball is meant, give Support(control_ball=...) (--control-eps)"
        wider, columns = breaking(case, control)
        if case.value(columns) <= LEFT:
            figures["falls_at_eps"] = float(wider.eps)
    return judged(left > LEFT, advice, **figures)


def _unfit(control: Predictor, case: Case) -> list[str]:
    """What keeps a predictor from being an undefended deterministic net of the same design."""
    faults = []
    if num_different(control) > 1 or is_stochastic(control, case.x[:8]):
        faults.append(
            "it averages over thetas or noise, which is a defense of a kind: give one net, such "
            "as model.at(theta)"
        )
    here, there = model_of(control), model_of(case.predict)
    if here is not None and there is not None and here.num_params != there.num_params:
        faults.append(
            f"its architecture is another ({here.num_params} parameters, not {there.num_params})"
        )
    return faults


def _too_wide(case: Case, control: Predictor) -> str:
    """Why nothing follows from a fall in the control ball that was given: it is of another norm, or
    wider than the one that the audit itself would go to."""
    ball = case.support.control_ball
    if ball is None:
        return ""
    if type(ball) is not type(case.ball):
        return f"the control ball is {ball}: give one of the norm of {case.ball}"
    most = max(case.ball.eps, farthest(case, control, ball))
    if ball.eps <= most * (1 + 1e-6):
        return ""
    return (
        f"in a control ball of eps = {ball.eps:g} everything falls, whatever the attack is worth: "
        f"give at most {most:.3g}, or none"
    )


def model_of(predict: Predictor | None) -> BayesianModel | None:
    """The model behind a predictor, where it shows one."""
    for inner in layers_of(predict):
        match inner:
            case object(model=BayesianModel() as model):
                return model
    return None


@torch.no_grad()
def clean_answers(predict: Predictor, case: Case) -> Tensor:  # (N,) bool
    """What is right on all of the data (up to 2,000 examples), not only on those attacked."""
    parts = (torch.split(part[:ALL], case.budget.batch_size) for part in case.whole)
    return torch.cat([metrics.correct(predict(x), y) for x, y in zip(*parts, strict=True)]).cpu()


def clean_accuracy(predict: Predictor, case: Case) -> float:
    """The share of `clean_answers` that is right."""
    return float(clean_answers(predict, case).double().mean())


def is_ahead(first: Tensor, second: Tensor, margin: float) -> bool:  # (N,) bool, paired
    """Whether the share of `first` exceeds that of `second` by significantly more than a margin:
    the score test of paired shares (Tango), at 1 %.

    >>> right = torch.arange(100)
    >>> is_ahead(right < 98, right < 85, 0.03), is_ahead(right < 98, right < 90, 0.03)
    (True, False)
    """
    num = len(first)
    ahead, behind = int((first & ~second).sum()), int((second & ~first).sum())
    # the likeliest share of "second alone" of those that put `first` ahead by just the margin
    linear = margin * (2 * num - ahead + behind) - ahead - behind
    root = math.sqrt(linear**2 + 8 * num * behind * margin * (1 - margin))
    spread = math.sqrt((root - linear) / 2 + num * margin * (1 - margin))
    return ahead - behind - num * margin > NormalDist().inv_cdf(1 - SIGNIFICANT) * spread


def apart(case: Case, ball: Ball | None = None) -> float:
    """The median distance between two examples, in the norm of the audited ball or another."""
    distance = (ball or case.ball).norm(case.x - case.x.roll(1, 0))
    return float(distance.median()) or math.inf


@torch.no_grad()
def farthest(case: Case, control: Predictor, ball: Ball) -> float:
    """How far a ball is widened to break the control: half the distance between two examples or,
    where that is more, as far as all but 3 % of them have one within reach that the control answers
    with another class than theirs."""
    prediction, nearest = control(case.x), [case.x.new_zeros(())]
    if predicts_classes(prediction):
        said = prediction.logits.argmax(-1)
        pairs = zip(case.x, case.y, strict=True)
        others = [case.x[said != label] - x for x, label in pairs if bool((said != label).any())]
        nearest = [ball.norm(each).min() for each in others] or nearest
    return max(0.5 * apart(case, ball), float(torch.stack(nearest).double().quantile(0.97)))


def comparing(case: Case, control: Predictor) -> Ball:
    """The ball in which adversarial training is compared to the control: the smallest in which that
    keeps a fifth at most, for farther out nothing may stand, however it was trained; not smaller
    than the audited one, nor beyond half the distance between two examples."""

    def make() -> Ball:
        ball, columns = _widened(case, control, FEW)
        stands, falls = max(case.ball.eps, ball.eps / GROWTH), ball.eps
        if stands < falls and case.value(columns) <= FEW:
            for _ in range(HALVINGS):
                between = math.sqrt(stands * falls)
                left = case.value(_left(case, control, replace(ball, eps=between)))
                stands, falls = (stands, between) if left <= FEW else (between, falls)
        return replace(ball, eps=min(falls, max(case.ball.eps, 0.5 * apart(case))))

    return case.once("comparing", make)


def compared(case: Case) -> Case:
    """The case with as many examples as a comparison wants, more than a look."""
    if len(case.x) >= COMPARED:
        return case
    x, y = (part[:COMPARED] for part in case.whole)
    return case.once("compared", lambda: replace(case, x=x, y=y, memory={}))


def _control(case: Case, control: Predictor) -> tuple[Ball, Columns]:
    """The control under attack, and in which ball: that of Support, the audited one where a figure
    is published for it, else the one that breaks it."""
    if case.support.control_ball is None and published_for(case.support.dataset, case.ball) is None:
        return breaking(case, control)
    ball = case.support.control_ball or case.ball
    return ball, _left(case, control, ball)


def breaking(case: Case, control: Predictor) -> tuple[Ball, Columns]:
    """The audited ball widened until the control falls; and what it leaves."""
    return case.once("breaking", lambda: _widened(case, control, LEFT))


def _widened(case: Case, control: Predictor, share: float) -> tuple[Ball, Columns]:
    """The audited ball widened until the control keeps no more than a share, up to half the
    distance between two examples or, where that is more, until nearly all of them have one within
    reach that the control answers otherwise, which an attack worth its name finds; and what it
    leaves. Every feature may change, for it is the attack that is on trial here."""
    ball = case.ball.freed()
    far = farthest(case, control, ball)
    most = far if ball.eps > 0 and far < math.inf else ball.eps
    while True:
        columns = _left(case, control, ball)
        if case.task == "regression" or case.value(columns) <= share or ball.eps >= most:
            return ball, columns
        ball = replace(ball, eps=min(ball.eps * GROWTH, most))


def _left(case: Case, predict: Predictor, ball: Ball) -> Columns:
    """The union of clean and the attacks under audit, on another predictor in some ball."""
    clean = case.scored(case.x, "control clean", by=predict)
    attacks, purpose = case.attacks_on(predict, ball), f"control {ball.eps:g}"
    attacked = case.union(attacks, purpose, through=predict, by=predict)
    return worst([clean, attacked], case.task)


@check("E21", "credible baseline", cost=lambda case: case.passes * (case.sources > 0))
def credible_baseline(case: Case) -> Finding:
    """E21: the published recipe is at most 5 points below its figure; where none is published,
    adversarial training is significantly more than 5 points ahead of the undefended control under
    the same attack, in regression better on average. Examples that rule out neither this nor the
    opposite say nothing."""
    support = case.support
    known = published_for(support.dataset, case.ball)
    published = known or support.published
    baseline = support.baseline or (recorded_for(support.dataset, case.ball) if published else None)
    if baseline is None:
        return not_run(
            "give Support(baseline=...), adversarial training or its record, or "
            "Support(training=(x, y))"
        )
    if isinstance(baseline, Baseline):
        return _recorded(case, baseline, published)
    if published is None:
        return _against_control(case, baseline)
    if not case.attacks_on(baseline):
        return no_attacks()
    if is_trivial(case, baseline):
        return not_run(TRIVIAL)
    if known is None and support.undefended is not None:  # a figure of one's own is soon reached
        beaten = _against_control(case, baseline)
        if beaten.status != "passed":
            return beaten
    clean = case.value(case.scored(case.x, "baseline clean", by=baseline))
    left = case.value(_left(case, baseline, case.ball))
    return _published(published, clean, left, examples=len(case.x), source="attacked here")


def _recorded(case: Case, record: Baseline, published: tuple[float, float] | None) -> Finding:
    """The baseline is the record of a published recipe."""
    if published is None:
        return not_run(
            f"the record is of {record.dataset}, {record.norm}, eps {record.eps:g}: give a baseline"
        )
    if not record.is_of(case.support.dataset, case.ball) and case.support.published is None:
        advice = "the record is of other data or another ball"
        return judged(True, advice, recorded=record.dataset)
    about = {"examples": record.num_examples, "source": f"recorded at {record.commit}"}
    return _published(published, record.clean, record.worst, **about)


def _published(
    published: tuple[float, float], clean: float, left: float, **about: object
) -> Finding:
    """What was reached here against the published clean and worst-case accuracy."""
    bad = clean < published[0] - BEHIND - 1e-9 or left < published[1] - BEHIND - 1e-9
    advice = "train the baseline as its authors do before beating it"
    figures = {"published_clean": published[0], "published_worst": published[1], **about}
    return judged(bad, advice, clean=clean, worst=left, **figures)


def _against_control(case: Case, baseline: Predictor) -> Finding:
    """Nothing is published: the baseline must beat the undefended control."""
    control = case.support.undefended
    if control is None or not case.attacks_on(baseline):
        return not_run(
            "nothing is published: give the undefended control too, which the baseline must beat"
        )
    case = compared(case)
    ball = comparing(case, control)
    plain, trained = (_left(case, each, ball) for each in (control, baseline))
    if case.value(trained) > case.value(plain):
        if is_trivial(case, baseline):
            return not_run(TRIVIAL)
        # it may hide its gradients, and stand against its own attack alone
        attacks = case.attacks_on(control, ball)
        transferred = case.union(attacks, "to the baseline", through=control, by=baseline)
        trained = worst([trained, transferred], case.task)
    undefended, defended = case.value(plain), case.value(trained)
    if case.task == "regression":  # the slope of the truth itself bounds what training can gain
        better = defended > undefended
        if undefended > defended and not breaks_more(case, trained, plain)[0]:
            return not_run(
                f"{len(case.x)} examples are too few to tell whether the baseline ({defended:.3f}) "
                f"or the control ({undefended:.3f}) is better: give more"
            )
    elif ball.eps <= case.ball.eps and max(undefended, defended) <= LEFT:
        return not_run(
            f"in the audited ball neither the control ({undefended:.3f}) nor the baseline "
            f"({defended:.3f}) stands, so that nothing can be compared: audit a smaller one"
        )
    else:
        better = is_ahead(trained["correct"] >= 0.5, plain["correct"] >= 0.5, AHEAD)
        if not better and (defended - undefended > AHEAD + 1e-9 or _too_few(plain, trained)):
            return not_run(
                f"{len(case.x)} examples are too few to tell whether the baseline "
                f"({defended:.3f}) is five points ahead of the control ({undefended:.3f}) in the "
                f"ball of eps = {ball.eps:.3g}: give more ({COMPARED} at least), or train the "
                f"baseline in that ball"
            )
    advice = (
        "adversarial training (in that ball, or the audited one) must be five points ahead of the "
        "undefended net under the same attack before anything else may"
    )
    if case.task == "regression":
        advice = "adversarial training must beat the undefended net before anything else may"
    figures = {"undefended": undefended, "baseline": defended, "eps": float(ball.eps)}
    return judged(not better, advice, **figures, examples=len(case.x))


def is_trivial(case: Case, baseline: Predictor) -> bool:
    """Whether it is no better on clean data than the most frequent class, in regression than the
    mean."""
    share = -1.0 if case.task == "regression" else float(case.y.bincount().max()) / len(case.y)
    # a mean in float32 is one up to rounding
    return case.value(case.scored(case.x, "baseline clean", by=baseline)) <= share + 1e-6


def has_learnt_less(case: Case, other: Predictor) -> bool:
    """Whether another predictor is trivial on all of the data (`is_trivial`; few examples may be
    bad luck), but the audited one is not."""
    x, y = (part[:ALL] for part in case.whole)
    case = replace(case, x=x, y=y, memory={})
    return is_trivial(case, other) and not is_trivial(case, case.predict)


def _too_few(plain: Columns, trained: Columns) -> bool:
    """Whether fewer examples than are wanted still allow an advantage of five points (Clopper and
    Pearson's upper bound)."""
    correct = trained["correct"]
    if len(correct) >= COMPARED:
        return False
    ahead = int(((correct >= 0.5) & (plain["correct"] < 0.5)).sum())
    return metrics.clopper_pearson(ahead, len(correct), side="upper")[1] >= AHEAD


# --- training what is missing -------------------------------------------------------------------


def _updates(num: int) -> int:
    """The steps of Adam on that many examples."""
    return max(UPDATES, round(EPOCHS * num / min(BATCH, num)))


def with_controls(case: Case, *, progress: bool | None = None) -> Support:
    """The case's support with the controls that it lacks, trained on its `training` data: an
    undefended point estimate of the predictor's own architecture, stopped where its clean accuracy
    is nearest to the audited model's, and adversarial training in the ball in which the two are
    compared, or the largest in which something is learnt (unless a published recipe is asked for).
    """
    support, model = case.support, model_of(case.predict)
    if support.training is None or not support.to_train or model is None or not case.attacks:
        return support
    x, y = as_tensors(support.training, model.dtype)
    classes = case.task == "classification"
    y = y.reshape(-1).long() if classes else y.reshape(len(y), *case.y.shape[1:]).to(x.dtype)
    options: Any = {"seed": case.seed, "progress": progress}
    control, baseline = support.undefended, support.baseline
    if control is None:
        target = clean_accuracy(case.predict, case) if classes else 0.0
        away = lambda net: abs(clean_accuracy(net, case) - target)  # noqa: E731
        control = trained_control(model, Noise(0.0), (x, y), away if classes else None, **options)
    if baseline is None and published_for(support.dataset, case.ball) is None:
        ball = comparing(compared(case), control)
        while True:
            channel = AttackChannel(pgd(ball, ATTACK_STEPS), 0.0)
            baseline = trained_control(model, channel, (x, y), None, **options)
            if ball.eps <= SMALLEST * case.ball.eps or not is_trivial(case, baseline):
                break
            # too far for anything to be learnt: a constant is nearly the best answer there
            ball = replace(ball, eps=0.5 * ball.eps)
    return replace(support, undefended=control, baseline=baseline)


def training_passes(case: Case) -> float:
    """About how many passes `with_controls` takes: one through the net for each theta of the
    predictor's passes."""
    if case.support.training is None:
        return 0.0
    num = len(case.support.training[0])
    share = _updates(num) * min(num, BATCH) / max(1, case.num_thetas or 1)
    work = {"undefended": 1.0, "baseline": 1.0 + ATTACK_STEPS}
    return share * sum(work[name] for name in case.support.to_train)


def trained_control(
    model: BayesianModel,
    channel: Channel,
    data: tuple[Tensor, Tensor],
    away: Callable[[Predictor], float] | None,
    *,
    seed: int,
    progress: bool | None = None,
) -> Predictor:
    """A point estimate from the net's initial weights: the state that is least `away` from where
    its clean accuracy should be, or else the last."""
    model, num = copy.deepcopy(model), len(data[0])
    posterior = PointMass(model)
    rounds = 1 if away is None else CHECKED
    best, nearest = math.inf, posterior.mean.clone()
    for turn in range(rounds):
        fit(
            model,
            posterior,
            channel,
            data,
            steps=math.ceil(_updates(num) / rounds),
            batch_size=min(BATCH, num),
            lr=RATE,
            seed=seed_for(seed, "audit/control", turn) % 2**31,
            progress=progress,
        )
        distance = 0.0 if away is None else away(model.at(posterior.mean))
        if distance < best:
            best, nearest = distance, posterior.mean.clone()
        if distance < 0.3 * NEAR:
            break
    return PosteriorPredictive(model, nearest.unsqueeze(0))
