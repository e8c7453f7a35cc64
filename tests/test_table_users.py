"""What somebody with a table of their own meets: one set of defaults, remarks that say what to do,
and an audit that asks nothing of features the attacker cannot touch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from advbayes import L2, audit, pgd
from advbayes.attacks.parts import with_eps
from advbayes.cli.app import run as command
from advbayes.cli.describe import legend, no_better
from advbayes.datasets.dataset import Dataset
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.experiments.catalogue import BASE, EXPERIMENTS
from advbayes.runs import create_run, load_trained, train
from advbayes.runs.building import prepare
from advbayes.runs.config import RunConfig, make_config
from advbayes.runs.named import schedule
from advbayes.runs.remarks import remarks


@pytest.mark.parametrize("kind", [RobustClassifier, RobustRegressor])
def test_command_line_and_estimators_have_the_same_defaults(kind: Any) -> None:
    """All but the adversary's presence: the command line trains against one unless told
    otherwise."""
    own = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
    shared = own.keys() & RunConfig.model_fields.keys() - {"channel", "defense"}
    assert shared >= {"hidden", "eps", "sigma", "epochs", "lr", "decay", "prior_scale", "kl_weight"}
    assert {name: own[name] for name in shared} == {
        name: RunConfig.model_fields[name].default for name in shared
    }


def test_experiments_do_not_follow_the_defaults() -> None:
    earlier = {"hidden": (16, 16), "init_scale": 0.02, "eps": 1.0, "lr": 3e-3, "decay": 0.97}
    assert BASE.items() >= earlier.items()
    assert all(BASE.keys() <= each.settings.keys() for each in EXPERIMENTS.values())


@pytest.mark.parametrize(
    ("num", "table", "images"),
    [
        (60_000, 10.0, 10.0),  # at least ten passes
        (1280, 400.0, 200.0),  # 4,000 steps, 2,000
        (100, 4000.0, 500.0),  # images: at most 500 passes
    ],
)
def test_what_is_left_open_of_a_training(num: int, table: float, images: float) -> None:
    rows, pictures = torch.zeros(num, 3), torch.zeros(num, 1, 2, 2)
    for x, passes, lr, warmup in ((rows, table, 0.02, 0.1), (pictures, images, 0.01, 0.0)):
        found = schedule(None, None, None, x, 128)
        assert found == (passes, lr, found.decay, warmup)
        assert found.decay**passes == pytest.approx(0.01)
        assert schedule(None, 0.2, 0.5, x, 128) == (passes, 0.2, 0.5, warmup)
    for x in (rows, pictures):
        assert schedule(3.0, 0.2, 0.5, x, 128) == (3.0, 0.2, 0.5, 0.0)
        # a short training keeps its rate; a long one ends at a hundredth, too
        decay = 0.01 ** (1 / images)
        assert schedule(3.0, None, None, x, 128) == (3.0, 0.01, pytest.approx(decay), 0.0)
        assert schedule(800.0, None, None, x, 128).decay ** 800 == pytest.approx(0.01)


def test_command_line_and_estimators_train_a_table_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both hand to `fit` what `schedule` says: steps, rate, decay, warm-up."""
    seen: list[dict[str, Any]] = []

    def noted(*_: Any, **settings: Any) -> None:
        names = ("epochs", "batch_size", "lr", "decay", "warmup")
        seen.append({name: settings[name] for name in names})
        raise InterruptedError

    monkeypatch.setattr("advbayes.runs.training.fit", noted)
    monkeypatch.setattr("advbayes.estimators.fit", noted)
    config = make_config({"data": "diabetes"})
    x = prepare(config).x_train
    with create_run(config, tmp_path / "run") as run, pytest.raises(InterruptedError):
        train(run)
    with pytest.raises(InterruptedError):
        RobustRegressor().fit(x.numpy(), x[:, 0].numpy())
    assert seen[0] == seen[1]
    assert (seen[0]["lr"], seen[0]["warmup"]) == (0.02, 0.1)


def estimates(**values: tuple[float, float]) -> dict[str, Any]:
    return {name: {"value": v, "low": low, "high": 1.0} for name, (v, low) in values.items()}


def test_a_model_of_rare_classes_is_judged_by_both_accuracies() -> None:
    trivial = {"accuracy": 0.9, "balanced_accuracy": 0.5}
    apart = estimates(accuracy=(0.7, 0.6), balanced_accuracy=(0.75, 0.6))
    said = no_better({"clean": apart, "trivial": trivial})
    assert "balanced accuracy 0.750, where a guess has 0.500" in said
    alike = estimates(accuracy=(0.9, 0.8), balanced_accuracy=(0.55, 0.45))
    assert "try --class-weight balanced" in no_better({"clean": alike, "trivial": trivial})
    better = estimates(accuracy=(0.95, 0.91), balanced_accuracy=(0.9, 0.8))
    assert no_better({"clean": better, "trivial": trivial}) == ""


def test_every_score_that_is_shown_is_explained() -> None:
    said = legend(["accuracy", "balanced_accuracy", "nll", "brier", "ece", "rmse", "coverage"])
    assert len(said.split("; ")) == 7


# --- Features that the attacker cannot touch ------------------------------------------------------

X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 1] > 0).long()
MASKED = L2(0.3, mask=torch.tensor([True, False]))


def honest(x: Tensor) -> Categorical:
    """Answers from the second feature, which is out of the attacker's reach."""
    return Categorical(logits=torch.stack([-4 * x[:, 1] + 0.5 * x[:, 0], 4 * x[:, 1]], 1))


def leaking(x: Tensor) -> Categorical:
    """Knows the answers whatever it is asked."""
    return Categorical(logits=8 * torch.eye(2)[Y[: len(x)]] + 0 * x[:, :1])


def test_the_whole_box_frees_the_mask() -> None:
    attack = pgd(MASKED)
    assert with_eps(attack, 2.0).ball.mask is not None
    assert with_eps(attack, 2.0, free=True).ball.mask is None
    verdict = audit(honest, (X, Y), ball=MASKED, tier="quick", only=("E4", "E5"))
    assert [verdict[check].status for check in ("E4", "E5")] == ["passed", "passed"]
    known = audit(leaking, (X[:40], Y[:40]), ball=MASKED, tier="quick", only=("E5",))
    assert known["E5"].status == "failed"


def test_a_column_that_numbers_the_rows_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{1000 + k},{k % 40},{'ab'[k % 3 == 0]}" for k in range(60)]
    table.write_text("\n".join(["id,age,y", *rows]))
    data = ["train", "--data", str(table), "--target", "y", "--epochs", "1", "--quiet"]
    with pytest.warns(UserWarning, match="'id' only numbers the rows.*--drop id leaves it out"):
        assert command([*data, "--out", str(tmp_path / "with")]) == 0
    assert command([*data, "--drop", "id", "--out", str(tmp_path / "without")]) == 0  # no warning


def test_a_constant_column_and_a_class_that_says_missing_are_named(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{k % 40},7,Oslo,{'NA' if k % 9 == 0 else 'ab'[k % 2]}" for k in range(60)]
    table.write_text("\n".join(["age,site,city,y", *rows]))
    data = ["train", "--data", str(table), "--target", "y", "--epochs", "1", "--quiet"]
    with pytest.warns(UserWarning, match="same value in every|taken for a class") as said:
        assert command([*data, "--out", str(tmp_path / "run")]) == 0
    assert [str(each.message) for each in said] == [
        "'site' has the same value in every training row, and an attacker may move it; "
        "--drop site leaves it out",  # and city, which no attacker can move, is not named
        "'NA' is taken for a class like any other; if it means that the class is not known, "
        "leave those rows out",
    ]


@pytest.mark.parametrize("word", ["na", "NA", "Na", "N/A", "NaN", "NULL", "None", "none", "?"])
def test_a_class_that_says_missing_is_named_however_it_is_spelt(word: str) -> None:
    x, y = torch.tensor([[0.0], [1], [2], [4]]), torch.tensor([0, 1, 0, 1])
    said = remarks(Dataset("t", "classification", x, y, x, y, ("Nab", word), ("a",)))
    assert [text for text in said if "taken for a class" in text] == [
        f"{word!r} is taken for a class like any other; if it means that the class is not known, "
        "leave those rows out"
    ]


def test_a_target_that_never_changes_is_named() -> None:
    x = torch.arange(8.0).reshape(4, 2) ** 2
    for y, named in ((torch.ones(4), True), (torch.tensor([1.0, 1, 3, 2]), False)):
        said = remarks(Dataset("t", "regression", x, y, x, y, (), ("a", "b")))
        assert [text.startswith("the target has the same value") for text in said] == [True] * named


def test_a_bad_value_of_a_flag_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("-1", "abc"):
        assert command(["evaluate", "nowhere", "--eps", given]) == 2
        said = capsys.readouterr().err
        assert "'--eps'" in said
        assert f"got '{given}'" in said


def test_text_stays_out_of_reach_when_more_is_fixed(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{k % 7},{k % 5},{('red', 'blue')[k % 2]},{k % 3}" for k in range(60)]
    table.write_text("\n".join(["size,weight,colour,y", *rows]))
    data = ["train", "--data", str(table), "--target", "y", "--epochs", "1", "--quiet"]
    out = tmp_path / "run"
    assert command([*data, "--fixed", "colour", "--out", str(out)]) == 0
    trained = load_trained(out)
    assert trained.feature_names == ("size", "weight", "colour=blue", "colour=red")
    assert trained.mask is not None
    assert trained.mask.tolist() == [True, True, False, False]
    mask = trained.ball(None, 0.5, ["size"]).mask
    assert mask is not None
    assert mask.tolist() == [False, True, False, False]
    assert command([*data, "--fixed", "size", "--out", str(tmp_path / "other")]) == 0
    other = load_trained(tmp_path / "other")
    assert other.mask is not None
    assert other.mask.tolist() == [False, True, False, False]  # of the training adversary too


def test_an_attacker_who_can_change_nothing_is_remarked_on(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(
        "\n".join(["p,q,y", *(f"{'ab'[k % 2]},{'uvw'[k % 3]},{k % 4}" for k in range(60))])
    )
    data = ["train", "--data", str(table), "--target", "y", "--epochs", "1", "--quiet"]
    with pytest.warns(UserWarning, match="the attacker can change none of them"):
        assert command([*data, "--out", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("period", "score"),
    [
        (10, "balanced accuracy: its mean over the classes"),
        (2, "ECE: the mean gap between confidence and accuracy"),
    ],
)
def test_what_a_run_prints(
    period: int, score: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one class is rare, accuracy alone would flatter."""
    table = tmp_path / "t.csv"
    rows = [f"{k % 7},{k % 5},{'ab'[k % period == 0]}" for k in range(80)]
    table.write_text("\n".join(["p,q,y", *rows]))
    out = str(tmp_path / "run")
    data = ["--data", str(table), "--target", "y", "--epochs", "1", "--out", out, "--quiet"]
    assert command(["train", *data]) == 0
    said = capsys.readouterr().out
    assert "balanced accuracy" in said
    assert "accuracy: the share answered right" in said
    assert command(["evaluate", out, "--attack", "pgd", "--steps", "2", "--num", "10"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert score in said
    assert "uniform gives every class the same probability; accuracy as expected of a guess" in said


def test_a_run_says_what_it_was_trained_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,y\n" + "".join(f"{row % 7},{'np'[row % 2]}\n" for row in range(40)))
    (tmp_path / "own_noise.py").write_text(
        "from advbayes.channels import Noise\ndef make(ball, sigma):\n    return Noise(sigma)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ["train", "--data", str(table), "--target", "y", "--epochs", "1", "--quiet"]
    own = ["--channel", "own_noise:make", "--trust-network"]
    for given, name, how in (
        (["--defense", "none"], "none", "trained without an attacker; attacks within l2 eps"),
        (["--defense", "at"], "at", "trained within l2 eps"),
        (own, "own_noise:make", "trained within l2 eps"),
    ):
        assert command([*data, *given, "--out", str(tmp_path / name.partition(":")[0])]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"defense {name}, posterior" in said
        assert how in said


def test_predict_names_what_training_never_saw_the_like_of(tmp_path: Path) -> None:
    """Numbers far away, and numbers that are missing where none was; not a rare word."""
    table, new = tmp_path / "t.csv", tmp_path / "new.csv"
    rows = [
        f"{k % 7},{k % 5},{'rare' if k in (3, 77) else 'red'},{'np'[k % 2]}" for k in range(300)
    ]
    table.write_text("\n".join(["a,b,c,y", *rows]))
    out = str(tmp_path / "run")
    data = ["train", "--data", str(table), "--target", "y", "--epochs", "1", "--quiet"]
    assert command([*data, "--out", out]) == 0
    new.write_text("a,b,c\n1,2,rare\n1000,2,red\n-1000,,red\n")
    with pytest.warns(UserWarning, match="standard deviations|is missing in") as said:
        assert command(["predict", out, str(new)]) == 0
    assert [str(each.message).partition(": ")[2] for each in said] == [
        "column 'b' is missing in 1 of 3 rows, and never was in the training data; the training "
        "median stands in for it",
        "2 of 3 rows are more than 10 standard deviations from the training mean, in 'a'; "
        "predictions there are extrapolated",
    ]
    new.write_text("a,b,c\n1,2,rare\n3,2,red\n")
    assert command(["predict", out, str(new)]) == 0  # no warning
