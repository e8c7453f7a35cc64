"""Others' models in, our predictors out; and others' attacks are no stronger than ours."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.base
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    Linf,
    MeanField,
    PosteriorPredictive,
    nll,
    one_step,
)
from advbayes.adapters import (
    from_function,
    from_sklearn,
    from_torch,
    to_art,
    to_autoattack,
    to_foolbox,
)
from advbayes.attacks import APGD, RandomSearch, squared_error, strong_suite
from advbayes.evaluation import evaluate
from advbayes.types import Predictor

# --- Into the library ----------------------------------------------------------------------------


def test_the_three_kinds_of_scores_give_the_same_prediction() -> None:
    scores = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "logits": lambda x: x,
        "log_probs": lambda x: x.log_softmax(-1),
        "probs": lambda x: x.softmax(-1),
    }
    for kind, function in kinds.items():
        torch.testing.assert_close(from_function(function, kind)(scores).probs, scores.softmax(-1))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda x: x.softmax(-1), "logits", "look like probabilities"),
        (lambda x: x.softmax(-1), "log_probs", "pass kind='probs'"),
        (lambda x: x.log_softmax(-1), "probs", "pass kind='logits'"),
        (lambda x: 0 * x, "logits", "all zero"),
        (lambda x: x[:2], "logits", "shape"),
        (lambda x: x[:, 0], "logits", "shape"),
        (lambda x: x[:, :1], "probs", "shape"),
        (lambda x: x / 0, "logits", "finite"),
        (lambda x: x[:2, 0], "mean", "shape"),
        (lambda x: x[:, 0], "mean_and_scale", "pair"),
    ],
)
def test_wrong_outputs_are_named_at_the_first_call(
    function: Callable[[Tensor], Tensor], kind: str, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        from_function(function, kind, scale=1.0 if kind == "mean" else None)(
            torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        )


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize(
    ("kind", "right", "wrong", "message"),
    [
        ("probs", lambda x: x.softmax(-1), lambda x: 1.01 * x.softmax(-1), "sum to 1"),
        ("log_probs", lambda x: x.log_softmax(-1), lambda x: x.log_softmax(-1) - 0.01, "log_probs"),
    ],
)
def test_one_wrong_row_is_enough(kind: str, right: Any, wrong: Any, message: str, row: int) -> None:
    def function(x: Tensor) -> Tensor:
        scores: Tensor = right(x).clone()
        scores[row] = wrong(x)[row]
        return scores

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    from_function(right, kind)(x)
    with pytest.raises(ValueError, match=message):
        from_function(function, kind)(x)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        from_function(lambda x: x, "scores")
    with pytest.raises(ValueError, match="scale goes with kind='mean'"):
        from_function(lambda x: x, "logits", scale=1.0)
    with pytest.raises(ValueError, match=r"evaluation mode, got layer '1'"):
        from_torch(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    with pytest.raises(TypeError, match="estimator"):
        from_sklearn(object())


def test_a_torch_regressor_is_attacked_like_ours() -> None:
    net = nn.Linear(3, 1)
    x, y = torch.randn(4, 3), torch.randn(4)
    for make in (lambda: from_torch(net, "mean"), lambda: from_function(net, "mean")):
        with pytest.raises(ValueError, match="scale must be given with kind='mean'"):
            make()
    predict = from_torch(net, "mean", scale=0.5)
    assert predict(x).variance.shape == (4,)
    before = squared_error(predict(x), y)
    assert bool((squared_error(predict(one_step(L2(0.5))(predict, x, y)), y) > before).all())


def test_a_pair_of_mean_and_scale() -> None:
    prediction = from_function(lambda x: (x[:, 0], x[:, 1].exp()), "mean_and_scale")(
        torch.tensor([[1.0, 0.0]])
    )
    assert float(prediction.mean) == 1.0
    assert float(prediction.stddev) == 1.0


def test_scikit_learn_estimators() -> None:
    linear_model, svm = (
        importlib.import_module("sklearn.linear_model"),
        importlib.import_module("sklearn.svm"),
    )
    rng = np.random.default_rng(0)
    data = rng.normal(size=(80, 3))
    labels = (data[:, 0] > 0).astype(int)
    x, y = torch.tensor(data, dtype=torch.float32), torch.tensor(labels)
    logistic = linear_model.LogisticRegression().fit(data, labels)
    torch.testing.assert_close(
        from_sklearn(logistic)(x).probs,
        torch.tensor(logistic.predict_proba(data), dtype=torch.float32),
    )
    decision = from_sklearn(svm.LinearSVC().fit(data, labels))
    assert float((decision(x).logits.argmax(-1) == y).float().mean()) > 0.9
    broken = RandomSearch(L2(3.0), 50)(decision, x, y, generator=torch.Generator().manual_seed(0))
    assert float((decision(broken).logits.argmax(-1) == y).float().mean()) < 0.6
    ridge = linear_model.Ridge().fit(data, data[:, 0])
    assert from_sklearn(ridge, scale=0.1)(x).mean.shape == (80,)


def three_classes() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    data = np.random.default_rng(0).normal(size=(150, 2))
    return data, np.array(["a", "b", "c"])[np.digitize(np.arctan2(data[:, 1], data[:, 0]), [-1, 1])]


def test_pairwise_decision_values_are_not_taken_for_classes() -> None:
    svm, pipeline, search = (
        importlib.import_module(f"sklearn.{name}")
        for name in ("svm", "pipeline", "model_selection")
    )
    data, labels = three_classes()
    x = torch.tensor(data)
    pairwise = svm.SVC(decision_function_shape="ovo")
    for told in (pairwise, pipeline.make_pipeline(pairwise)):
        with pytest.raises(ValueError, match="decision_function_shape='ovo'"):
            from_sklearn(told.fit(data, labels))

    def hidden(labels: Any) -> Any:  # a search does not say what it searched
        return from_sklearn(search.GridSearchCV(pairwise, {}, cv=2).fit(data, labels))

    whole, row_by_row = hidden(labels), hidden(labels)
    with pytest.raises(ValueError, match="at the class that it predicts"):
        whole(x)
    with pytest.raises(ValueError, match="at the class that it predicts"):
        [row_by_row(row.unsqueeze(0)) for row in x]
    four = np.where(data[:, 0] > 1, "d", labels)
    with pytest.raises(ValueError, match=r"each of its 4 classes, got shape \(150, 6\)"):
        hidden(four)(x)


class Disagreeing(sklearn.base.ClassifierMixin, sklearn.base.BaseEstimator):
    """Predicts class 1 where the second feature says so, and always decides for class 0."""

    def __init__(self) -> None:
        self.classes_ = np.array([0, 1, 2])
        self.n_features_in_ = 2

    def decision_function(self, x: Any) -> Any:
        return np.tile([2.0, -1.0, -1.0], (len(x), 1))

    def predict(self, x: Any) -> Any:
        return np.asarray(x)[:, 1].astype(int)


@pytest.mark.parametrize("batch", [1, 100, 256, 400])
def test_decision_values_may_differ_on_a_tenth_of_the_rows_compared(batch: int) -> None:
    """However the rows come: the first 256 are compared, and no more than 1 + 25.6 may differ."""

    def ask(wrong: int) -> None:
        x = torch.zeros(400, 2)
        x[256 - wrong :, 1] = 1.0  # from 256 on, nobody looks
        predict = from_sklearn(Disagreeing())
        for start in range(0, 400, batch):
            predict(x[start : start + batch])

    ask(26)
    with pytest.raises(ValueError, match=r"got another on 27 of 256 examples"):
        ask(27)


@pytest.mark.parametrize("name", ["SVC", "LinearSVC"])
def test_decision_values_of_each_class_predict_what_the_estimator_does(name: str) -> None:
    svm = importlib.import_module("sklearn.svm")
    data, labels = three_classes()
    fitted = getattr(svm, name)().fit(data, labels)
    ours = fitted.classes_[from_sklearn(fitted)(torch.tensor(data)).logits.argmax(-1).numpy()]
    # predict breaks a tie of votes by the order of classes
    assert float((ours == fitted.predict(data)).mean()) > 0.98
    two = np.where(labels == "c", "b", labels)
    binary = svm.SVC(decision_function_shape="ovo").fit(data, two)  # one pair: nothing to confuse
    assert (
        binary.classes_[from_sklearn(binary)(torch.tensor(data)).logits.argmax(-1).numpy()]
        == binary.predict(data)
    ).all()


def test_a_regressor_without_a_deviation_takes_it_from_residuals() -> None:
    linear_model = importlib.import_module("sklearn.linear_model")
    data = np.random.default_rng(0).normal(size=(30, 3))
    ridge = linear_model.Ridge().fit(data, data[:, 0])
    with pytest.raises(ValueError, match="scale must be given for Ridge"):
        from_sklearn(ridge)
    wanted = ridge.predict(data) + np.where(np.arange(30) % 2, 0.7, -0.7)
    said = from_sklearn(ridge, data=(data, wanted))(torch.tensor(data)).stddev
    torch.testing.assert_close(said, torch.full((30,), 0.7, dtype=torch.float64))
    assert bool((from_sklearn(ridge, scale=0.5)(torch.tensor(data)).stddev == 0.5).all())


def test_a_regressor_with_a_deviation_of_its_own_uses_it() -> None:
    linear_model = importlib.import_module("sklearn.linear_model")
    gaussian_process = importlib.import_module("sklearn.gaussian_process")
    rng = np.random.default_rng(0)
    data = rng.normal(size=(30, 3))
    y = data[:, 0] + 0.1 * rng.normal(size=30)
    x = torch.tensor(data + 0.5)
    process = gaussian_process.GaussianProcessRegressor(alpha=0.01, optimizer=None)
    pipeline = importlib.import_module("sklearn.pipeline").make_pipeline
    scaler = importlib.import_module("sklearn.preprocessing").StandardScaler()
    for estimator in (linear_model.BayesianRidge(), process, pipeline(scaler, process)):
        mean, std = estimator.fit(data, y).predict(data + 0.5, return_std=True)
        prediction = from_sklearn(estimator)(x)
        torch.testing.assert_close(prediction.mean, torch.tensor(mean))
        torch.testing.assert_close(prediction.stddev, torch.tensor(std))
        # what is said goes first
        assert bool((from_sklearn(estimator, scale=2.0)(x).stddev == 2).all())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_refused(value: float) -> None:
    scale = torch.tensor([1.0, value, 1.0])
    with pytest.raises(ValueError, match=r"the function's scale must be (positive|finite)"):
        from_function(lambda x: (x[:, 0], scale), "mean_and_scale")(torch.ones(3, 2))


@pytest.mark.parametrize("mean", [(3,), (3, 1)])
@pytest.mark.parametrize("scale", [(), (3,), (3, 1)])
def test_a_column_of_scales_goes_with_a_row_of_means(
    mean: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    deviations = torch.tensor([1.0, 2.0, 3.0]).reshape(scale) if scale else torch.tensor(2.0)
    prediction = from_function(lambda x: (x[:, 0].reshape(mean), deviations), "mean_and_scale")(
        torch.ones(3, 2)
    )
    assert torch.equal(prediction.stddev, deviations.reshape(-1).expand(3))


def test_scales_of_two_outputs_and_those_that_do_not_fit() -> None:
    shared = from_function(lambda x: (x, torch.tensor([1.0, 2.0])), "mean_and_scale")(
        torch.ones(3, 2)
    )
    assert torch.equal(shared.stddev, torch.tensor([[1.0, 2.0]]).expand(3, 2))
    with pytest.raises(
        ValueError, match=r"the function's scale must fit its mean of shape \(3, 2\)"
    ):
        from_function(lambda x: (x, torch.ones(3)), "mean_and_scale")(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"the function's scale must fit its mean of shape \(3,\)"):
        from_function(lambda x: (x[:, 0], torch.ones(3, 2)), "mean_and_scale")(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("of_net", "of_x"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("kind", ["logits", "mean"])
def test_the_net_and_the_data_may_differ_in_dtype(
    of_net: torch.dtype, of_x: torch.dtype, kind: str
) -> None:
    net = nn.Linear(4, 3 if kind == "logits" else 1).to(of_net)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(of_x)
    y = torch.arange(6) % 3 if kind == "logits" else torch.linspace(-1, 1, 6, dtype=of_x)
    predict = from_torch(net, kind, scale=None if kind == "logits" else 0.5)
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(predict(inputs).log_prob(y).sum(), inputs)
    assert gradient.dtype == of_x
    assert bool((gradient != 0).any())
    for attack in (one_step(L2(0.5)), APGD(L2(0.5), nll, steps=5)):
        x_adv = attack(predict, x, y)
        assert x_adv.dtype == of_x
        assert bool((predict(x_adv).log_prob(y) < predict(x).log_prob(y)).any())
    found = evaluate(predict, (x.numpy(), y.numpy()), attacks={"a": one_step(L2(0.5))})
    log_probs = found.columns(found.predictors[0])["log_prob"]
    assert log_probs.shape == (6,)


# --- Out of the library: the others' attacks against our suite ----------------------------------


class Trained:
    """Digits in [0, 1], three small predictors trained on them, and 500 test points."""

    def __init__(self) -> None:
        digits = importlib.import_module("sklearn.datasets").load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)[order]
        y = torch.tensor(digits.target)[order]
        self.x, self.y, train = x[:500], y[:500], (x[500:], y[500:])
        dense = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        robust = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for net in (dense, robust):
                for layer in net:
                    if isinstance(layer, nn.Linear):
                        layer.reset_parameters()
        _train(dense, *train)
        _train(robust, *train, ball=L2(0.6, box=(0, 1)))
        model = BayesianModel(dense, Categorical())
        posterior = MeanField(model, init=model.theta_of(dense), init_scale=0.05)
        thetas = posterior.sample(4, generator=torch.Generator().manual_seed(1)).detach()
        self.predictors: dict[str, Predictor] = {
            "dense": from_torch(dense.eval()),
            "predictive": PosteriorPredictive(model, thetas),
            "robust": from_torch(robust.eval()),
        }
        self.eps = {"dense": 0.5, "predictive": 0.5, "robust": 0.8}
        self._ours: dict[tuple[str, str], float] = {}

    def ball(self, name: str, norm: str) -> L2 | Linf:
        return (
            L2(self.eps[name], box=(0, 1)) if norm == "L2" else Linf(self.eps[name] / 5, box=(0, 1))
        )

    def accuracy(self, name: str, x: Tensor) -> float:
        with torch.no_grad():
            return float((self.predictors[name](x).logits.argmax(-1) == self.y).double().mean())

    def ours(self, name: str, norm: str) -> float:
        if (name, norm) not in self._ours:
            ball = self.ball(name, norm)
            x_adv = strong_suite(ball, queries=200)(
                self.predictors[name], self.x, self.y, generator=torch.Generator().manual_seed(0)
            )
            assert bool(ball.contains(x_adv, self.x).all())
            self._ours[name, norm] = self.accuracy(name, x_adv)
        return self._ours[name, norm]


def _train(net: nn.Module, x: Tensor, y: Tensor, ball: L2 | None = None) -> None:
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    shuffle = torch.Generator().manual_seed(2)
    for _ in range(30):
        for batch in torch.randperm(len(x), generator=shuffle).split(128):
            points = (
                x[batch] if ball is None else one_step(ball)(from_torch(net), x[batch], y[batch])
            )
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(points), y[batch]).backward()
            optimiser.step()


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


NAMES = ("dense", "predictive", "robust")
LEEWAY = 0.005


def check(trained: Trained, name: str, norm: str, theirs: Tensor, who: str) -> None:
    """Ours leaves no more than theirs plus half a point, on a case where there is something left to
    win and to lose."""
    left, clean = trained.accuracy(name, theirs), trained.accuracy(name, trained.x)
    assert clean > 0.9
    assert left < clean
    assert trained.ours(name, norm) <= left + LEEWAY, (
        f"{who} leaves {left:.3f}, ours {trained.ours(name, norm):.3f}"
    )


@pytest.mark.parametrize(("name", "norm"), [*((name, "L2") for name in NAMES), ("dense", "Linf")])
def test_foolbox_is_not_stronger(trained: Trained, name: str, norm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        foolbox = importlib.import_module("foolbox")
    model, eps = to_foolbox(trained.predictors[name]), trained.ball(name, norm).eps
    kind = foolbox.attacks.L2PGD if norm == "L2" else foolbox.attacks.LinfPGD
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, theirs, _ = kind(rel_stepsize=2.5 / 50, steps=50)(
            model, trained.x, trained.y, epsilons=eps
        )
    check(trained, name, norm, theirs, "Foolbox")


@pytest.mark.parametrize(
    ("name", "norm"), [("dense", "Linf"), ("predictive", "L2"), ("robust", "L2")]
)
def test_autoattack_is_not_stronger(trained: Trained, name: str, norm: str) -> None:
    importlib.import_module("pyautoattack")
    attack = to_autoattack(trained.predictors[name], trained.ball(name, norm), 10)
    attack.square.n_queries = 500  # of the whole attack only its repetitions are cut
    attack.apgd.n_restarts = attack.fab.n_restarts = 1
    attack.fab.n_iter = 30
    with torch.random.fork_rng():
        theirs = attack.run_standard_evaluation(trained.x, trained.y, batch_size=500)
    check(trained, name, norm, _examples(theirs), "AutoAttack")


def _examples(result: Any) -> Tensor:
    examples = result[0] if isinstance(result, tuple) else result
    assert isinstance(examples, Tensor)
    return examples


@pytest.mark.parametrize("name", NAMES)
def test_art_is_not_stronger(trained: Trained, name: str) -> None:
    evasion = importlib.import_module("art.attacks.evasion")
    wrapped = to_art(trained.predictors[name], (1, 8, 8), 10, box=(0.0, 1.0))
    eps = trained.ball(name, "L2").eps
    attack = evasion.ProjectedGradientDescent(
        wrapped,
        norm=2,
        eps=eps,
        eps_step=2.5 * eps / 50,
        max_iter=50,
        batch_size=500,
        verbose=False,
    )
    theirs = torch.tensor(attack.generate(trained.x.numpy(), trained.y.numpy()))
    check(trained, name, "L2", theirs, "ART")


def test_art_attacks_a_regressor_as_hard_as_we_do() -> None:
    evasion = importlib.import_module("art.attacks.evasion")
    net = nn.Linear(4, 1)
    predict = from_torch(net, "mean", scale=1.0)
    x, y = torch.randn(20, 4), torch.randn(20)
    attack = evasion.ProjectedGradientDescent(
        to_art(predict, (4,)),
        norm=2,
        eps=0.5,
        eps_step=0.1,
        max_iter=30,
        batch_size=20,
        verbose=False,
    )
    theirs = squared_error(predict(torch.tensor(attack.generate(x.numpy(), y.numpy()))), y)
    ours = squared_error(predict(strong_suite(L2(0.5), queries=0)(predict, x, y)), y)
    assert bool((ours >= theirs - 1e-4).all())
    assert bool((theirs > squared_error(predict(x), y)).all())


def classes(x: Tensor) -> torch.distributions.Categorical:
    return torch.distributions.Categorical(logits=x.flatten(1)[:, :4])


def test_autoattack_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"box=\(0, 1\)"):
        to_autoattack(classes, L2(1.0), 10)
    with pytest.raises(ValueError, match=r"box=\(0, 1\)"):
        to_autoattack(classes, L2(1.0, box=(torch.zeros(4), torch.full((4,), 2.0))), 10)


def test_autoattack_takes_a_unit_box_of_tensors_and_images_of_the_classes_it_was_told() -> None:
    importlib.import_module("pyautoattack")
    x = torch.rand(8, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    y = classes(x).logits.argmax(-1)
    ball = L2(0.2, box=(torch.zeros(1, 3, 3), torch.ones(1, 3, 3)))
    with pytest.raises(ValueError, match="x must have 4 dimensions"):
        to_autoattack(classes, ball, 4).run_standard_evaluation(x.flatten(1), y)
    for wrong in (3, 5):
        with pytest.raises(
            ValueError, match=f"num_classes must be the number that predict knows, 4, got {wrong}"
        ):
            to_autoattack(classes, ball, wrong).run_standard_evaluation(x, y)
    attack = to_autoattack(classes, ball, 4)
    attack.attacks_to_run = ["apgd-ce"]
    with torch.random.fork_rng():
        x_adv, predicted = attack.run_standard_evaluation(x, y)
    assert bool(ball.contains(x_adv, x).all())
    assert torch.equal(predicted, classes(x_adv).logits.argmax(-1))


def test_art_is_told_the_number_of_classes() -> None:
    importlib.import_module("art.estimators")
    wrapped = to_art(classes, (9,), 5)
    with pytest.raises(
        ValueError, match="num_classes must be the number that predict knows, 4, got 5"
    ):
        wrapped.predict(np.zeros((2, 9), dtype=np.float32))
