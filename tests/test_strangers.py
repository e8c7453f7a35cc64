"""Models and labels as strangers bring them: each works or is refused in a line that says how it
would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from advbayes import L2, audit, evaluate, one_step
from advbayes.adapters import from_function, from_sklearn, from_torch
from advbayes.attacks import RandomSearch
from advbayes.checks import InputError, InputTypeError
from advbayes.cli.foreign import Foreign, load_foreign
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.runs.config import ConfigError

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
STEP = {"step": one_step(L2(0.3))}


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Named(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "hidden": x}


class OnlyProbabilities:
    def predict_proba(self, x: Any) -> Any:
        p = 1 / (1 + np.exp(-np.asarray(x)[:, 0]))
        return np.stack([1 - p, p], 1)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a network": (nn.Linear(3, 2), InputTypeError, r"shape \(24, 2\).*from_torch\(net\.eval"),
    "of float64": (nn.Linear(3, 2).double(), InputError, r"float32 inputs.*dtype.*from_torch"),
    "of pairs": (Pair(3, 2), InputTypeError, r"got a tuple \(a torch\.float32.*from_torch"),
    "nothing": (None, InputTypeError, "predict must be a Predictor: callable on x.*got None"),
    "a path": ("model.pt", InputTypeError, "must be a Predictor.*got 'model.pt'"),
    "predict_proba": (OnlyProbabilities(), InputTypeError, r"from_function\(model\.predict_proba"),
    "pairs, wrapped": (from_torch(Pair(3, 2)), InputTypeError, r"a tuple .*lambda x: net\(x\)\[0"),
    "a dict, wrapped": (from_torch(Named(3, 2)), InputTypeError, "a dict of 'logits', 'hidden'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_predictor_is_told_how_to_become_one(case: str) -> None:
    predict, kind, message = REFUSED[case]
    with pytest.raises(kind, match=f"(?s){message}"):
        evaluate(predict, (X, Y), attacks=STEP)
    with pytest.raises(kind, match=f"(?s){message}"):
        audit(predict, (X, Y), ball=L2(0.3), tier="quick")


def test_the_remedies_work() -> None:
    model, pair = OnlyProbabilities(), Pair(3, 2)
    with pytest.raises(InputTypeError, match=r"from_function\(model\.predict_proba"):
        from_sklearn(model)
    box = from_function(model.predict_proba, "probs", numpy=True)
    assert len(evaluate(box, (X, Y), attacks={"random": RandomSearch(L2(0.3), 2)}).cells)
    for predict in (
        from_function(lambda x: pair(x)[0], "logits"),
        from_torch(nn.Linear(3, 2).double()),
    ):
        assert len(evaluate(predict, (X, Y), attacks=STEP).cells)


def test_a_fault_of_a_function_stays_its_own() -> None:
    def fails(x: Tensor) -> Any:
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match=r"^my own$"):
        evaluate(fails, (X, Y), attacks=STEP)


def test_labels_that_are_none() -> None:
    x, words = X.numpy(), np.array(["no", "yes"])
    with pytest.raises(InputTypeError, match=r"y must hold numbers.*<U3"):
        evaluate(from_torch(nn.Linear(3, 2)), (x, words[Y]), attacks=STEP)
    with pytest.raises(InputTypeError, match=r"labels of one type.*got NoneType, str"):
        RobustClassifier(epochs=1).fit(x, np.array(["a", None] * 12, object))
    with pytest.raises(InputTypeError, match="y must hold numbers, got an array of <U"):
        RobustRegressor(epochs=1).fit(x, x[:, 0].astype(str))


FACTORIES = """
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

def unfitted(): return LogisticRegression()
def probs(): return nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1))
def wide(): return nn.Linear(3, 1).double()
"""


def test_a_factory_is_told_what_it_may_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a regression in float64 is asked in float64."""
    (tmp_path / "factories_of_strangers.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    classes, numbers = str(tmp_path / "c.npz"), str(tmp_path / "n.npz")
    np.savez(classes, x=X.numpy(), y=Y.numpy())
    np.savez(numbers, x=X.numpy(), y=X[:, 0].numpy())

    def made(name: str, data: str) -> Foreign:
        return load_foreign(f"factories_of_strangers:{name}", data, target=None, task=None)

    with pytest.raises(ConfigError, match="a fitted estimator, got a LogisticRegression without"):
        made("unfitted", classes)
    with pytest.raises(ConfigError, match=r"look like probabilities.*from_torch\(net, 'probs'\)"):
        made("probs", classes)
    foreign = made("wide", numbers)
    said = foreign.predict(foreign.x)
    residuals = said.mean.detach() - foreign.y
    assert float(said.stddev[0]) == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-5)


BLACK_BOXES = """
import numpy as np
import torch


def probabilities(x):
    p = 1 / (1 + np.exp(-4 * np.asarray(x)[:, 0]))
    return np.stack([p, 1 - p], 1)  # up, then down


class Box:
    def predict_proba(self, x):
        return probabilities(x)


class Labelled(Box):
    classes_ = np.array(["up", "down"])


box, labelled = Box, Labelled
function = lambda: probabilities
distributions = lambda: lambda x: torch.distributions.Categorical(
    probs=torch.as_tensor(probabilities(x.numpy()))
)
"""


@pytest.mark.parametrize("name", ["box", "labelled", "function", "distributions"])
def test_a_black_box_that_gives_probabilities_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However it is asked, with a gradient wanted or not, it says what it says; the classes are in
    its order where it has one, else as --classes says, else (which is told) as the data's."""
    (tmp_path / "black_boxes.py").write_text(BLACK_BOXES)
    rows = [f"{a},{b},{'up' if a > 0 else 'down'}" for a, b in X[:, :2].tolist()]
    (tmp_path / "t.csv").write_text("a,b,kind\n" + "\n".join(rows))
    monkeypatch.syspath_prepend(tmp_path)
    order: tuple[tuple[str, ...], ...] = (("up", "down"), ())
    for classes in order:
        model = f"black_boxes:{name}"
        data = str(tmp_path / "t.csv")
        foreign = load_foreign(model, data, target="kind", task=None, classes=classes)
        with_gradient = foreign.predict(foreign.x.clone().requires_grad_())
        assert torch.equal(with_gradient.probs, foreign.predict(foreign.x).probs)
        right = with_gradient.probs.argmax(1) == foreign.y
        known = name == "labelled" or bool(classes)
        assert bool(right.all()) if known else not bool(right.any())
        assert foreign.assumed == (not known)
