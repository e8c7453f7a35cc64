"""Every option has its effect: each test here is about one or several options, and none may be
without a test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import typer
from torch import nn

import advbayes.runs.training
import advbayes.runs.verdict
from advbayes.auditing import Verdict
from advbayes.channels import Noise
from advbayes.cli import main
from advbayes.cli.app import app
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.evaluation import load_evaluation
from advbayes.runs import Run, load_trained
from advbayes.runs.config import make_config

SHOWN: dict[str, set[str]] = {}
Printed = pytest.CaptureFixture[str]
NET = (
    "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), "
    "nn.Linear(4, 2))\n"
)
TINY = {"epochs": "1", "hidden": "4", "batch_size": "16"}


def shows(command: str, *options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test as one that would fail if these options were ignored."""
    SHOWN.setdefault(command, set()).update(options)
    return lambda test: test


def options_of(command: str) -> set[str]:
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {parameter.name for parameter in known.params if parameter.name != "help"}


# --- runs to use ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables: three features, a class or a number to predict."""
    folder = tmp_path_factory.mktemp("options")
    x = np.random.default_rng(0).normal(size=(80, 3))
    kinds = np.where(x[:, 0] + 0.3 * x[:, 1] > 0, "yes", "no")
    lines = [",".join(f"{value:.4f}" for value in row) for row in x]
    (folder / "kinds.csv").write_text(
        "a,b,c,kind\n" + "\n".join(f"{r},{k}" for r, k in zip(lines, kinds, strict=True))
    )
    target = x @ [1.0, -2.0, 0.5]
    (folder / "numbers.csv").write_text(
        "a,b,c,y,z\n"
        + "\n".join(f"{r},{t:.4f},{-t:.4f}" for r, t in zip(lines, target, strict=True))
    )
    (folder / "options_net.py").write_text(NET)
    return folder


def training(folder: Path, out: Path, **settings: str) -> list[str]:
    given = TINY | {"data": str(folder / "kinds.csv"), "target": "kind"} | settings
    flags = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", value)]
    return ["train", *flags, "--out", str(out), "--quiet"]


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    assert (
        main(
            training(
                place, place / "run", defense="os", eps="0.4", sigma="0.2", epochs="20", lr="0.05"
            )
        )
        == 0
    )
    return str(place / "run")


@pytest.fixture(scope="module")
def regression(place: Path) -> str:
    settings = {
        "data": str(place / "numbers.csv"),
        "target": "y",
        "defense": "mix",
        "epochs": "20",
        "lr": "0.05",
    }
    assert main(training(place, place / "regression", **settings)) == 0
    return str(place / "regression")


def told(capsys: Printed, argv: list[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


# --- train ----------------------------------------------------------------------------------------

# A value that must change what is trained, the other settings under which it does, and what must be
# seen in the result.
KEYS: dict[str, tuple[str, dict[str, str], Callable[[Any], Any], Any]] = {
    "hidden": ("5", {}, lambda t: t.model.num_params, 3 * 5 + 5 + 5 * 2 + 2),
    "posterior": ("point", {}, lambda t: type(t.posterior).__name__, "PointMass"),
    "members": ("3", {"posterior": "ensemble"}, lambda t: len(t.thetas()), 3),
    "rank": ("2", {"posterior": "low_rank"}, lambda t: t.posterior.factor.shape[-1], 2),
    "prior_scale": ("0.1", {}, lambda t: t.model.prior_scale, 0.1),
    "init_scale": ("0.5", {}, lambda t: bool(t.thetas().std(0).mean() > 0.2), True),
    "defense": ("noise", {}, lambda t: t.defense, "noise"),
    "norm": ("linf", {}, lambda t: t.norm, "linf"),
    "eps": ("0.25", {}, lambda t: t.eps, 0.25),
    "sigma": ("0.7", {"defense": "noise"}, lambda t: t.channel.sigma, 0.7),
    "attack_steps": ("2", {"defense": "pgd"}, lambda t: t.channel.attack.stages[0][1], 2),
    "beta": ("0.5", {"defense": "trades"}, None, None),
    "precision": ("bfloat16", {}, None, None),
    "epochs": ("2", {}, lambda t: Run(t.path).manifest["steps"], 8),
    "batch_size": ("32", {}, lambda t: Run(t.path).manifest["steps"], 2),
    "lr": ("0.1", {}, None, None),
    "decay": ("0.5", {"epochs": "2"}, None, None),
    "adversary_lr": ("0.5", {"defense": "nn"}, None, None),
    "num_theta": ("3", {}, None, None),
    "num_channel": ("3", {}, None, None),
    "bound": ("importance_weighted", {"num_channel": "3"}, None, None),
    "class_weight": ("balanced", {"num_train": "21"}, None, None),
    "kl_weight": ("0", {}, None, None),
    "seed": ("5", {}, lambda t: t.seed, 5),
    "feature_eps": (
        "a=0.3",
        {"norm": "linf", "eps": "1"},
        lambda t: [round(float(v), 3) for v in (t.scale * t.scaling.std)[:1]],
        [0.3],
    ),
    "fixed": ("a,b", {}, lambda t: t.mask.tolist(), [False, False, True]),
    "features": ("c,a", {}, lambda t: t.feature_names, ("c", "a")),
    "drop": ("b", {}, lambda t: t.feature_names, ("a", "c")),
    "num_train": ("20", {}, lambda t: Run(t.path).manifest["steps"], 2),
}


@shows("train", *KEYS, "out", "quiet")
@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_what_is_trained(place: Path, key: str) -> None:
    value, base, probe, wanted = KEYS[key]
    plain = trained_hash(place, tuple(base.items()))
    out = place / f"with-{key}"
    assert main(training(place, out, **base | {key: value})) == 0
    found = load_trained(out)
    assert Run(out).manifest["weights"] != plain
    assert (None if probe is None else probe(found)) == wanted


@lru_cache
def trained_hash(place: Path, settings: tuple[tuple[str, str], ...]) -> str:
    out = place / f"base-{hashlib.sha256(str(settings).encode()).hexdigest()[:8]}"
    assert main(training(place, out, **dict(settings))) == 0
    return str(Run(out).manifest["weights"])


@shows("train", "text")
def test_codes_are_taken_for_text(place: Path) -> None:
    """By every command, whatever the rows to predict look like; and no attacker changes them."""
    rows = [f"{'00150' if n % 3 else '1234'},{n % 7},{n % 2 + n % 3}" for n in range(60)]
    (place / "codes.csv").write_text("\n".join(["zip,size,y", *rows]))
    (place / "new.csv").write_text("zip,size\n00150,3\n1234,3\n")
    settings = {"data": str(place / "codes.csv"), "target": "y", "text": "zip", "epochs": "30"}
    assert main(training(place, place / "codes", **settings)) == 0
    trained = load_trained(place / "codes")
    assert trained.feature_names == ("size", "zip=00150", "zip=1234")
    assert trained.mask is not None
    assert trained.mask.tolist() == [True, False, False]
    out = place / "codes-answers.csv"
    assert main(["evaluate", str(place / "codes"), "--attack", "pgd1", "--quiet"]) == 0
    assert main(["predict", str(place / "codes"), str(place / "new.csv"), "--out", str(out)]) == 0
    first, second = (line.split(",") for line in out.read_text().splitlines()[1:])
    assert first != second


@shows("train", "noise_scale", "target", "task", "data")
def test_keys_of_the_data_and_of_regression(place: Path) -> None:
    numbers = {"data": str(place / "numbers.csv")}
    for name, settings in {
        "fixed": {"target": "y", "noise_scale": "0.25"},
        "learned": {"target": "y"},
        "each": {"target": "y", "noise_scale": "heteroscedastic"},
        "z": {"target": "z"},
        "both": {"target": "y,z"},
    }.items():
        assert main(training(place, place / f"data-{name}", **numbers | settings)) == 0
    fixed, learned, z, both = (
        load_trained(place / f"data-{name}") for name in ("fixed", "learned", "z", "both")
    )
    assert fixed.model.likelihood.scale == 0.25  # type: ignore[attr-defined]
    assert learned.model.num_params == fixed.model.num_params + 1
    each = load_trained(place / "data-each")
    # an output more, instead of one scale
    assert each.model.num_params == learned.model.num_params + 4
    spread = each.predict()(torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).variance
    assert len(set(spread.tolist())) == 5
    assert (fixed.target_names, z.target_names, both.target_names) == (("y",), ("z",), ("y", "z"))
    (place / "digits.csv").write_text("a,b\n" + "\n".join(f"{i % 7},{i % 3}" for i in range(60)))
    for task in ("classification", "regression"):
        settings = {"data": str(place / "digits.csv"), "target": "b", "task": task}
        assert main(training(place, place / f"task-{task}", **settings)) == 0
        assert load_trained(place / f"task-{task}").task == task


@shows("train", "network", "trust_network")
def test_a_network_of_ones_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    argv = training(place, place / "own", network="options_net:make")
    assert main(argv) == 2
    assert (
        main(
            [
                *argv[: argv.index("--out")],
                "--out",
                str(place / "own2"),
                "--quiet",
                "--trust-network",
            ]
        )
        == 0
    )
    assert load_trained(place / "own2", trusted=True).model.num_params == 3 * 4 + 4 + 4 * 2 + 2
    assert main(training(place, place / "conv", network="conv")) == 2


@shows("train", "channel")
def test_a_channel_of_ones_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "options_channel.py").write_text(
        "from advbayes import Noise\nmake = lambda ball, sigma: Noise(7 * sigma)\n"
    )
    argv = training(place, place / "own-channel", channel="options_channel:make", sigma="0.5")
    assert main(argv) == 2
    assert (
        main(
            [
                *argv[: argv.index("--out")],
                "--out",
                str(place / "own-channel2"),
                "--quiet",
                "--trust-network",
            ]
        )
        == 0
    )
    assert load_trained(place / "own-channel2", trusted=True).channel == Noise(3.5)


@shows("train", "compile", "own_thetas", "threads", "checkpoint_every")
def test_keys_of_the_machine_reach_the_training(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, seen = advbayes.runs.training.fit, []
    before = torch.get_num_threads()

    def fit(*args: Any, **settings: Any) -> Any:
        keys = ("compile", "own_thetas", "checkpoint_every", "progress")
        seen.append((*(settings[key] for key in keys), torch.get_num_threads()))
        return kept(*args, **settings | {"compile": False})

    monkeypatch.setattr(advbayes.runs.training, "fit", fit)
    argv = training(place, place / "machine", threads="2", checkpoint_every="3")
    try:
        assert main([*argv, "--compile", "--own-thetas"]) == 0
        loud = [word for word in training(place, place / "machine2") if word != "--quiet"]
        assert main([*loud, "--no-compile"]) == 0
    finally:
        torch.set_num_threads(before)
    assert seen == [(True, True, 3, False, 2), (False, False, 200, None, 1)]


@shows("train", "root", "config", "resume", "json")
def test_files_of_a_training(place: Path, tmp_path: Path, capsys: Printed) -> None:
    assert (
        main(["train", "--data", "mnist", "--root", str(tmp_path), "--out", str(tmp_path / "m")])
        == 2
    )
    assert str(tmp_path) in capsys.readouterr().err
    file = tmp_path / "settings.toml"
    file.write_text(
        f'data = "{place / "kinds.csv"}"\ntarget = "kind"\nhidden = [3]\nepochs = 1\nbatch_size = '
        f"16\n"
    )
    found = told(capsys, ["train", "--config", str(file), "--out", str(tmp_path / "run")])
    assert found["config"]["hidden"] == [3]
    assert told(capsys, ["train", "--resume", str(tmp_path / "run")])["weights"] == found["weights"]


# --- attack and evaluate --------------------------------------------------------------------------

# A flag, its value, and the attack under which it must change the adversarial examples.
ATTACKING = {
    "feature-eps": ("b=0.05", "pgd"),
    "fixed": ("b", "pgd"),
    "attack": ("ent", "pgd"),
    "eps": ("0.9", "pgd"),
    "norm": ("linf", "pgd"),
    "steps": ("2", "pgd"),
    "restarts": ("4", "pgd"),
    "queries": ("3", "random"),
    "num": ("5", "pgd"),
    "thetas": ("2", "pgd"),
    "seed": ("9", "random"),
}


def arrays(run: str, out: Path, **flags: str) -> dict[str, np.ndarray]:
    given = {"attack": "pgd", "num": "12", "steps": "6", "eps": "0.5"} | flags
    argv = [part for key, value in given.items() for part in (f"--{key}", value)]
    assert main(["attack", run, *argv, "--out", str(out)]) == 0
    with np.load(out) as found:
        return dict(found)


@shows("attack", "run", "out", *(flag.replace("-", "_") for flag in ATTACKING))
@pytest.mark.parametrize("flag", ATTACKING)
def test_a_flag_changes_the_attack(run: str, tmp_path: Path, flag: str) -> None:
    value, attack = ATTACKING[flag]
    plain = arrays(run, tmp_path / "a.npz", attack=attack)
    again = arrays(run, tmp_path / "b.npz", attack=attack)
    other = arrays(run, tmp_path / "c.npz", **{"attack": attack} | {flag: value})
    assert np.array_equal(plain["x_adv"], again["x_adv"])
    assert not np.array_equal(plain["x_adv"], other["x_adv"])
    moved = np.linalg.norm(other["x_adv"] - other["x"], axis=1)
    wanted = {"eps": 0.9, "norm": 0.5 * 3**0.5}.get(flag, 0.5)
    exact = attack == "pgd" and flag not in ("attack", "feature-eps")
    assert moved.max() == pytest.approx(wanted, rel=1e-3) if exact else moved.max() < 0.501
    assert len(other["x"]) == (5 if flag == "num" else 12)
    b = np.abs(other["x_adv"] - other["x"])[:, 1].max() * load_trained(run).scaling.std[1].item()  # type: ignore[union-attr]
    assert b < 0.0501 if flag == "feature-eps" else (b == 0) == (flag == "fixed")


@shows("evaluate", "fixed", "feature_eps")
@shows(
    "evaluate",
    "run",
    "attack",
    "eps",
    "norm",
    "steps",
    "restarts",
    "queries",
    "num",
    "thetas",
    "seed",
    "name",
    "json",
)
def test_flags_of_an_evaluation_are_in_what_it_keeps(run: str, capsys: Printed) -> None:
    fixed = told(
        capsys,
        [
            "evaluate",
            run,
            "--num",
            "4",
            "--attack",
            "pgd1",
            "--fixed",
            "b",
            "--feature-eps",
            "c=0.5",
        ],
    )
    assert (
        fixed["threat_model"][0]["raw"] | {"b": 0.0, "c": pytest.approx(0.5)}
        == fixed["threat_model"][0]["raw"]
    )
    said = load_evaluation(fixed["evaluation"]).config["attacks"]["pgd1"]
    assert "mask=" in said
    assert "scale=" in said
    argv = [
        "evaluate",
        run,
        "--attack",
        "pgd",
        "--attack",
        "random",
        "--eps",
        "0.2",
        "--eps",
        "0.6",
        "--norm",
        "linf",
    ]
    argv += [
        "--steps",
        "3",
        "--restarts",
        "2",
        "--queries",
        "7",
        "--num",
        "9",
        "--thetas",
        "2",
        "--seed",
        "4",
        "--name",
        "kept",
    ]
    found = told(capsys, argv)
    assert Path(found["evaluation"]).name == "kept"
    kept = load_evaluation(found["evaluation"])
    assert (kept.attacks, kept.radii) == (("pgd", "random"), (0.2, 0.6))
    assert kept.config["seed"] == 4
    assert len(next(iter(kept.cells.values()))["log_prob"]) == 9
    said = str(kept.config["attacks"])
    for part in ("Linf", "restarts=2", "3)", "7"):
        assert part in said, said
    thetas = told(capsys, [*argv[: argv.index("--name")], "--name", "more", "--thetas", "5"])
    assert thetas["rows"][0]["nll"] != found["rows"][0]["nll"]


@shows("evaluate", "batch_size")
def test_evaluations_are_written_in_blocks(run: str, capsys: Printed) -> None:
    few = ["--attack", "pgd1", "--num", "10", "--thetas", "2"]
    for size, name in (("4", "fours"), ("10", "tens")):
        found = told(capsys, ["evaluate", run, *few, "--batch-size", size, "--name", name])
        blocks = list((Path(found["evaluation"]) / "blocks").iterdir())
        assert len(blocks) >= (3 if size == "4" else 1)
        if size == "4":
            many = len(blocks)
    assert many == 3 * len(blocks)


@shows("evaluate", "quiet")
@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_hides_the_progress(run: str, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import advbayes.evaluation

    shown, real = [], advbayes.evaluation.evaluate

    def noted(*given: Any, progress: bool | None, **options: Any) -> Any:
        shown.append(progress)
        return real(*given, progress=progress, **options)

    monkeypatch.setattr(advbayes.evaluation, "evaluate", noted)
    argv = ["evaluate", run, "--attack", "pgd1", "--num", "5", "--thetas", "2"]
    argv += ["--name", f"quiet-{quiet}"]
    assert main([*argv, "--quiet"] if quiet else argv) == 0
    assert shown == [False if quiet else None]


@shows("evaluate", "purify")
@pytest.mark.parametrize("update", ["online", "offline"])
def test_purification_is_evaluated_with_the_attacks_made_for_it(
    run: str, capsys: Printed, update: str
) -> None:
    found = told(
        capsys,
        ["evaluate", run, "--attack", "pgd1", "--num", "6", "--thetas", "2", "--purify", update],
    )
    rows = {(row["predictor"], row["attack"]) for row in found["rows"]}
    assert {
        ("os", "pgd1"),
        (f"os purified {update}", "pgd1"),
        (f"os purified {update}", "adaptive"),
    } <= rows


# --- audit ----------------------------------------------------------------------------------------


@shows(
    "audit",
    "run",
    "tier",
    "fixed",
    "feature_eps",
    "eps",
    "norm",
    "undefended",
    "control_eps",
    "num",
    "thetas",
    "require",
    "seed",
    "json",
)
def test_flags_of_an_audit_reach_it(
    run: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    seen: dict[str, Any] = {}

    def audit(predict: Any, data: Any, **settings: Any) -> Verdict:
        seen.update(settings, predict=predict, num=len(data[0]))
        return Verdict((), settings["tier"])

    monkeypatch.setattr(advbayes.runs.verdict, "audit", audit)
    assert main(training(place, place / "control", defense="none")) == 0
    plain = told(capsys, ["audit", run])
    assert (plain["tier"], plain["norm"], plain["threat_model"]["eps"]) == ("standard", "l2", 0.4)
    assert len(seen["predict"].thetas) == 20
    argv = [
        "audit",
        run,
        "--tier",
        "quick",
        "--eps",
        "0.3",
        "--norm",
        "linf",
        "--undefended",
        str(place / "control"),
    ]
    argv += [
        "--fixed",
        "a",
        "--feature-eps",
        "b=2",
        "--control-eps",
        "3",
        "--num",
        "7",
        "--thetas",
        "2",
        "--seed",
        "5",
    ]
    told(capsys, argv)
    assert (seen["tier"], str(seen["ball"])[:8], seen["num"], seen["seed"]) == (
        "quick",
        "Linf(0.3",
        7,
        5,
    )
    assert len(seen["predict"].thetas) == 2
    # the control is attacked in the same ball but for its size
    ball, control = seen["ball"], seen["support"].control_ball
    assert control == replace(ball, eps=3.0, scale=control.scale)
    assert torch.allclose(3.0 * control.scale[1], 0.3 * ball.scale[1])  # of b, still 2
    assert seen["ball"].mask.tolist() == [False, True, True]
    assert float(0.3 * seen["ball"].scale[1] * load_trained(run).scaling.std[1]) == pytest.approx(2)  # type: ignore[union-attr]
    assert seen["support"].undefended is not None
    monkeypatch.setattr(Verdict, "level", property(lambda self: "C"))
    for wanted, code in (("A", 3), ("B", 3), ("C", 0)):
        told(capsys, [*argv, "--require", wanted], code)


def test_what_no_flag_says_is_taken_from_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """By an audit, an evaluation and an attack alike, of a run that has nothing by default."""
    settings = {"norm": "linf", "eps": "0.25", "fixed": "a", "feature_eps": "b=0.1"}
    assert main(training(place, tmp_path / "run", **settings)) == 0
    run, seen = str(tmp_path / "run"), dict[str, Any]()

    def audit(predict: Any, data: Any, **settings: Any) -> Verdict:
        seen.update(settings)
        return Verdict((), settings["tier"])

    monkeypatch.setattr(advbayes.runs.verdict, "audit", audit)
    few = ["--num", "6", "--thetas", "2"]
    assert told(capsys, ["audit", run, *few, "--tier", "quick"])["norm"] == "linf"
    assert told(capsys, ["evaluate", run, *few, "--attack", "pgd", "--name", "one"])
    kept = load_evaluation(tmp_path / "run" / "evaluation" / "one").config["attacks"]["pgd"]
    std = load_trained(run).scaling.std  # type: ignore[union-attr]
    ball = seen["ball"]
    assert (type(ball).__name__, ball.eps, ball.mask.tolist()) == (
        "Linf",
        0.25,
        [False, True, True],
    )
    assert float(0.25 * ball.scale[1] * std[1]) == pytest.approx(0.1)
    assert kept.startswith(f"PGD(ball={ball!r}"), kept
    assert main(["attack", run, *few, "--out", str(tmp_path / "a.npz")]) == 0
    with np.load(tmp_path / "a.npz") as found:
        moved = np.abs(found["x_adv"] - found["x"]).max(0)
    assert moved == pytest.approx(np.array([0.0, 0.1 / float(std[1]), 0.25]), rel=1e-4)


def test_audits_of_other_predictors_do_not_share_an_evaluation(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """Of another number of thetas or examples, another radius or norm."""
    seen = []

    def audit(predict: Any, data: Any, *, support: Any, tier: str, **_: Any) -> Verdict:
        made = support.evaluation
        seen.append((made.folder, len(made.columns("os", "clean")["correct"])))
        return Verdict((), tier)

    monkeypatch.setattr(advbayes.runs.verdict, "audit", audit)
    plain = {"--num": "5", "--thetas": "2", "--eps": "0.15", "--norm": "l2"}
    for changed in ({}, {"--thetas": "3"}, {"--num": "6"}, {"--eps": "0.1"}, {"--norm": "linf"}):
        told(capsys, ["audit", run, *(word for pair in (plain | changed).items() for word in pair)])
    assert len({name for name, _ in seen}) == 5
    assert [num for _, num in seen] == [5, 5, 6, 5, 5]


THEIRS = """
import csv
from pathlib import Path
from torch import nn, tensor
from torch.distributions import Categorical

def rows(name):
    with (Path(__file__).parent / name).open() as file:
        return list(csv.reader(file))[1:]

def pipeline():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    x = [[float(v) for v in row[:3]] for row in rows("kinds.csv")]
    y = [row[3] for row in rows("kinds.csv")]
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y)

def net():
    made = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    made[0].weight.data = tensor([[9.0, 3.0, 0.0], [-9.0, -3.0, 0.0]])  # the first output is yes
    return made

def line():
    made = nn.Linear(4, 1)
    made.weight.data, made.bias.data = tensor([[1.0, -2.0, 0.5, 0.0]]), tensor([0.0])
    return made

def predictor():
    return lambda x: Categorical(logits=x[:, :2])

def numbered():  # labels are the numbers 0 and 1
    from sklearn.linear_model import LogisticRegression
    x = [[float(v) for v in row[:3]] for row in rows("kinds.csv")]
    return LogisticRegression().fit(x, [int(row[3] == "yes") for row in rows("kinds.csv")])

nothing = object
"""


@shows("audit", "model", "data", "target", "task", "classes", "report")
def test_models_of_others_are_audited(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    import advbayes.cli.foreign

    monkeypatch.chdir(place)
    (place / "options_theirs.py").write_text(THEIRS)
    seen: dict[str, Any] = {}

    def audit(predict: Any, data: Any, **settings: Any) -> Verdict:
        seen.update(settings, predict=predict, x=data[0], y=data[1])
        return Verdict((), settings["tier"])

    monkeypatch.setattr(advbayes.cli.foreign, "audit", audit)
    argv = [
        "--data",
        "kinds.csv",
        "--target",
        "kind",
        "--eps",
        "0.3",
        "--norm",
        "linf",
        "--tier",
        "quick",
        "--seed",
        "3",
    ]

    def right() -> float:
        return float((seen["predict"](seen["x"]).probs.argmax(1) == seen["y"]).double().mean())

    told(capsys, ["audit", "--model", "options_theirs:pipeline", *argv])
    assert (len(seen["x"]), seen["tier"], seen["seed"], str(seen["ball"])) == (
        80,
        "quick",
        3,
        "Linf(0.3)",
    )
    assert right() > 0.9  # string labels, raw units
    told(
        capsys,
        ["audit", "--model", "options_theirs:net", *argv, "--classes", "yes,no", "--num", "50"],
    )
    assert len(seen["x"]) == 50
    assert right() > 0.95
    told(capsys, ["audit", "--model", "options_theirs:net", *argv])
    assert right() < 0.05  # in the order of the data's classes, no comes first
    numbers = [
        "--data",
        "numbers.csv",
        "--target",
        "y",
        "--task",
        "regression",
        "--eps",
        "0.1",
        "--tier",
        "quick",
    ]
    told(capsys, ["audit", "--model", "options_theirs:line", *numbers])
    assert torch.allclose(seen["predict"](seen["x"]).mean, seen["y"], atol=1e-3)
    found = told(
        capsys,
        [
            "audit",
            "--model",
            "options_theirs:predictor",
            *argv,
            "--num",
            "8",
            "--report",
            str(tmp_path / "r"),
        ],
    )
    assert "<!doctype html>" in Path(found["report"]).read_text()
    for wrong in (
        ["audit", *argv],
        ["audit", "--model", "options_theirs:nothing", *argv],
        ["audit", "--model", "nowhere", *argv],
    ):
        assert main(wrong) == 2


def test_a_model_of_others_meets_data_of_its_kind(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    import advbayes.cli.foreign

    monkeypatch.chdir(place)
    (place / "options_kinds.py").write_text(THEIRS)
    seen: dict[str, Any] = {}

    def audit(predict: Any, data: Any, **settings: Any) -> Verdict:
        seen.update(settings, predict=predict, x=data[0], y=data[1])
        return Verdict((), settings["tier"])

    monkeypatch.setattr(advbayes.cli.foreign, "audit", audit)
    kinds = (place / "kinds.csv").read_text()
    coded = tmp_path / "coded.csv"
    coded.write_text(kinds.replace("yes", "1").replace("no", "0"))
    argv = ["audit", "--eps", "0.5", "--target", "kind", "--data", str(coded)]
    theirs = [*argv, "--model", "options_kinds:numbered"]
    assert main([*theirs, "--tier", "quick"]) == 0
    assert capsys.readouterr().out.startswith("audit (quick): 64 examples, about ")  # cost first
    told(capsys, [*theirs, "--fixed", "a", "--feature-eps", "b=2"])
    # numbers as labels: the estimator knows that they are classes
    assert (seen["predict"](seen["x"]).probs.argmax(1) == seen["y"]).double().mean() > 0.9
    assert seen["ball"].mask.tolist() == [False, True, True]
    assert seen["ball"].scale.tolist() == [1.0, 4.0, 1.0]
    texts = tmp_path / "texts.csv"
    worded = kinds.replace("c,kind", "c,d,kind").replace(",yes", ",x,yes")
    texts.write_text(worded.replace(",no", ",y,no"))
    for wrong, message in (
        ([*theirs, "--task", "regression"], "model: must be for regression"),
        ([*argv[:-1], str(texts), "--model", "options_kinds:net"], "must hold numbers alone"),
        ([*argv, "--model", "options_kinds:net"], "rows of shape (3,) for regression (a, b, c)"),
        ([*theirs, "--undefended", "x"], "--undefended: must go with a run"),
        ([*theirs, "--control-eps", "1"], "--control-eps: must go with a run"),
        ([*theirs, "--thetas", "3"], "--thetas: must go with a run"),
        ([*theirs, "--device", "cuda"], "--device: must go with a run"),
    ):
        assert main(wrong) == 2, wrong
        assert message in " ".join(capsys.readouterr().err.split())


# --- certify, predict, report, datasets, show, demo -----------------------------------------------


@shows("certify", "run", "sigma", "num", "draws", "alpha", "seed", "json")
def test_flags_of_a_certificate(run: str, capsys: Printed) -> None:
    plain = ["--sigma", "0.2", "--num", "4", "--draws", "200"]
    base = told(capsys, ["certify", run, *plain])
    assert len(base["radii"]) == 4
    assert max(base["radii"]) > 0
    for flag, value in {"--sigma": "0.4", "--draws": "400", "--alpha": "0.2"}.items():
        assert told(capsys, ["certify", run, *plain, flag, value])["radii"] != base["radii"], flag
    largest = (
        base["sigma"]
        * torch.distributions.Normal(0, 1).icdf(torch.tensor(0.001 ** (1 / 200))).item()
    )
    assert max(base["radii"]) <= largest + 1e-6  # what 200 draws of one answer can prove
    seeds = [
        told(capsys, ["certify", run, *plain, "--seed", str(seed)])["radii"] for seed in range(4)
    ]
    assert seeds[0] == base["radii"]
    assert any(radii != seeds[0] for radii in seeds)


@shows("predict", "model", "input", "out", "thetas", "level", "json")
def test_flags_of_a_prediction(
    regression: str, place: Path, tmp_path: Path, capsys: Printed
) -> None:
    argv = ["predict", regression, str(place / "numbers.csv")]
    found = {
        level: told(capsys, [*argv, "--level", level])["predictions"] for level in ("0.5", "0.9")
    }
    edges = {"0.5": ("y 50% low", "y 50% high"), "0.9": ("y 90% low", "y 90% high")}
    widths = {
        level: np.subtract(found[level][high], found[level][low]).mean()
        for level, (low, high) in edges.items()
    }
    assert 1.8 < widths["0.9"] / widths["0.5"] < 3.2  # 2.44 for a Gaussian
    assert told(capsys, argv)["predictions"] == found["0.9"]
    assert told(capsys, [*argv, "--thetas", "2"])["predictions"]["y"] != found["0.9"]["y"]
    for name in ("p.csv", "p.npz", "p.json"):
        assert told(capsys, [*argv, "--out", str(tmp_path / name)])["out"] == str(tmp_path / name)
    assert json.loads((tmp_path / "p.json").read_text()) == found["0.9"]
    with np.load(tmp_path / "p.npz") as kept:
        assert kept["y"].tolist() == found["0.9"]["y"]


@shows("predict", "threshold", "positive")
def test_a_threshold_decides_between_two_classes(run: str, place: Path, capsys: Printed) -> None:
    argv = ["predict", run, str(place / "kinds.csv")]
    plain = told(capsys, argv)["predictions"]
    level = sorted(plain["p(yes)"])[60]
    found = told(capsys, [*argv, "--threshold", str(level), "--positive", "yes"])["predictions"]
    assert found["class"].count("yes") == 20  # from the threshold on, the threshold included
    assert found["p(yes)"] == plain["p(yes)"]
    assert (
        main([*argv, "--threshold", "0.5"])
        == main([*argv, "--threshold", "0.5", "--positive", "maybe"])
        == 2
    )


@shows("report", "run", "out", "title", "thetas", "json")
def test_flags_of_a_report(run: str, tmp_path: Path, capsys: Printed) -> None:
    told(
        capsys,
        ["evaluate", run, "--attack", "pgd1", "--num", "8", "--thetas", "2", "--name", "reported"],
    )
    first = told(capsys, ["report", run, "--out", str(tmp_path / "a"), "--thetas", "2"])
    assert first["html"] == str(tmp_path / "a" / "report.html")
    titled = told(
        capsys, ["report", run, "--out", str(tmp_path / "b"), "--thetas", "2", "--title", "Of mine"]
    )
    assert json.loads(Path(titled["json"]).read_text())["title"] == "Of mine"
    assert "<title>Of mine" in Path(titled["html"]).read_text()
    other = told(capsys, ["report", run, "--out", str(tmp_path / "c"), "--thetas", "3"])
    assert other["sha256"] != first["sha256"]  # the gallery's predictions are those of other thetas


@shows("datasets", "fetch", "root", "json")
def test_flags_of_the_list_of_data_sets(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(capsys, ["datasets", "--fetch", "digits"])["shape"] == [1, 8, 8]
    (tmp_path / "mnist").mkdir()
    listed = {
        row["name"]: row["place"]
        for row in told(capsys, ["datasets", "--root", str(tmp_path / "none")])["datasets"]
    }
    assert listed["mnist"].startswith("not here")


@shows("show", "path", "json")
def test_flags_of_show(run: str, capsys: Printed) -> None:
    assert told(capsys, ["show", run])["run"] == run
    assert told(capsys, ["show", f"{run}/model.advbayes"])["bundle"].endswith("model.advbayes")


@shows("demo", "out", "seed", "quick", "json")
def test_flags_of_the_demo_reach_it(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    import advbayes.experiments.demo

    seen: list[Any] = []

    def run_demo(out: str, **settings: Any) -> dict[str, Any]:
        seen.append((out, settings))
        return {"report": "there"}

    monkeypatch.setattr(advbayes.experiments.demo, "run_demo", run_demo)
    assert told(capsys, ["demo", "--out", "x", "--seed", "3", "--quick"]) == {"report": "there"}
    assert main(["demo"]) == 0
    assert seen == [
        ("x", {"seed": 3, "quick": True, "quiet": True}),
        ("demo-report", {"seed": 0, "quick": False, "quiet": False}),
    ]


@shows(
    "reproduce",
    "name",
    "preset",
    "seeds",
    "row",
    "jobs",
    "cluster",
    "out",
    "changes",
    "num_test",
    "again",
    "quiet",
)
@shows(
    "compare",
    "data",
    "defense",
    "seeds",
    "target",
    "eps",
    "jobs",
    "cluster",
    "out",
    "changes",
    "num_test",
    "as_json",
    "quiet",
)
def test_flags_of_experiments_reach_them(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    import advbayes.experiments.running
    import advbayes.experiments.views

    seen: list[Any] = []
    written = tmp_path / "table.md"
    written.write_text("the table")
    monkeypatch.setattr(
        advbayes.experiments.running,
        "run",
        lambda *given, **more: seen.append((*given, more)) or tmp_path,
    )
    monkeypatch.setattr(advbayes.experiments.views, "write_views", lambda folder: written)
    argv = [
        "reproduce",
        "wine",
        "--preset",
        "quick",
        "--seeds",
        "3,4",
        "--row",
        "MIX",
        "--jobs",
        "2",
        "--cluster",
        "local",
        "--out",
        str(tmp_path),
    ]
    assert main([*argv, "--set", "epochs=3", "--num-test", "7", "--again", "--quiet"]) == 0
    spec, out, more = seen[0]
    assert (spec.name, spec.preset, spec.num_test, out) == ("wine", "quick", 7, tmp_path)
    assert dict(spec.settings) == {"epochs": 3}
    side = {"jobs": 2, "cluster": "local", "quiet": True}
    assert more == {"seeds": [3, 4], "rows": ["MIX"], "again": True, **side}
    argv = [
        "compare",
        "--data",
        str(place / "kinds.csv"),
        "--target",
        "kind",
        "--defense",
        "mix",
        "--defense",
        "at",
    ]
    argv += [
        "--seeds",
        "2",
        "--eps",
        "0.3",
        "--jobs",
        "2",
        "--cluster",
        "local",
        "--out",
        str(tmp_path),
        "--set",
        "epochs=3",
        "--num",
        "7",
    ]
    capsys.readouterr()
    assert told(capsys, argv)["table"] == str(written)
    assert main([*argv, "--quiet"]) == 0
    assert "the table" in capsys.readouterr().out
    spec, out, more = seen[1]
    assert (spec.num_test, spec.defenses, spec.task, spec.eps, out) == (
        7,
        ("mix", "at"),
        "classification",
        0.3,
        tmp_path,
    )
    wanted = {"eps": 0.3, "epochs": 3, "data": str(place / "kinds.csv"), "target": "kind"}
    assert dict(spec.settings) == wanted
    assert more == {"seeds": [0, 1], **side}


TRUSTING = {
    "predict": lambda run, folder: ["predict", run, str(folder / "kinds.csv")],
    "attack": lambda run, folder: [
        "attack",
        run,
        "--num",
        "2",
        "--steps",
        "1",
        "--out",
        str(folder / "trusted.npz"),
    ],
    "evaluate": lambda run, folder: [
        "evaluate",
        run,
        "--num",
        "2",
        "--attack",
        "pgd1",
        "--thetas",
        "2",
    ],
    "certify": lambda run, folder: ["certify", run, "--num", "1", "--draws", "20"],
    "audit": lambda run, folder: ["audit", run, "--tier", "quick", "--num", "2"],
}


@shows("predict", "trust_network")
@shows("attack", "trust_network", "json")
@shows("evaluate", "trust_network")
@shows("certify", "trust_network")
@shows("audit", "trust_network")
def test_code_of_ones_own_runs_only_when_trusted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(advbayes.runs.verdict, "audit", lambda *_, tier, **__: Verdict((), tier))
    argv = training(place, place / "trusted", network="options_net:make")
    assert main([*argv, "--trust-network"]) == 0
    for command, made in TRUSTING.items():
        words = made(str(place / "trusted"), place)
        capsys.readouterr()
        assert main(words) == 2, command
        assert "--trust-network" in capsys.readouterr().err
        told(capsys, [*words, "--trust-network"])


@shows("report", "trust_network")
def test_a_report_shows_examples_of_a_trusted_network_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(place)
    run = str(place / "reported")
    argv = training(place, place / "reported", network="options_net:make")
    assert main([*argv, "--trust-network"]) == 0
    assert (
        main(
            ["evaluate", run, "--num", "4", "--attack", "pgd1", "--thetas", "2", "--trust-network"]
        )
        == 0
    )
    for more, wanted in (([], False), (["--trust-network"], True)):
        found = json.loads(
            Path(told(capsys, ["report", run, "--thetas", "2", *more])["json"]).read_text()
        )
        assert (found["gallery"] is not None) is wanted


@shows("train", "device")
@shows("predict", "device")
@shows("evaluate", "device")
@shows("audit", "device")
@shows("certify", "device")
def test_a_device_is_asked_for(place: Path, run: str, capsys: Printed) -> None:
    """tests/test_devices.py has what it does where there is one."""
    for argv in (
        training(place, place / "nowhere"),
        ["predict", run, str(place / "kinds.csv")],
        ["evaluate", run],
        ["audit", run],
        ["certify", run],
    ):
        assert main([*argv, "--device", "abacus"]) == 2
        assert "device: must be one that torch has on this machine" in capsys.readouterr().err
    assert not (place / "nowhere").exists()


def test_defenses_are_compared_by_the_names_that_train_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    import advbayes.experiments.running
    import advbayes.experiments.views
    from advbayes.runs.config import RunConfig

    seen: list[Any] = []
    monkeypatch.setattr(
        advbayes.experiments.running, "run", lambda spec, *_, **__: seen.append(spec)
    )
    monkeypatch.setattr(advbayes.experiments.views, "write_views", lambda _: tmp_path / "table.md")
    names = get_args(RunConfig.model_fields["defense"].annotation)
    argv = [word for name in names for word in ("--defense", name)]
    assert told(capsys, ["compare", "--data", "diabetes", *argv])
    experiment = seen[0].experiment()
    rows = list(experiment.rows.values())
    trained = [make_config({**row.defense.settings, **row.settings}) for row in rows]
    assert len(rows) == len(names) + 1  # and the constant
    assert {trained[0].defense, trained[names.index("pgd")].defense} == {"none", "pgd"}
    # one budget for all, the default of `train`, also where a row of the paper has its own
    assert {each.eps for each in trained} == {RunConfig().eps} == set(experiment.radii)


@shows("playground", "port", "browser")
def test_the_playgrounds_server_is_started_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Server:
        returncode = 0

        def __init__(self, argv: list[str], **options: Any) -> None:
            started.append(argv)

        def wait(self) -> None: ...
        def terminate(self) -> None: ...

    monkeypatch.setattr("advbayes.cli.experiments.find_spec", lambda name: True)
    monkeypatch.setattr("advbayes.experiments.playground.load_world", lambda name, tell: None)
    monkeypatch.setattr("subprocess.Popen", Server)
    assert main(["playground"]) == main(["playground", "--port", "9000", "--no-browser"]) == 0
    for argv, port, headless in zip(started, ("8501", "9000"), ("false", "true"), strict=True):
        assert argv.count(f"--server.port={port}") == 1
        assert argv.count(f"--server.headless={headless}") == 1


# --- none without a test --------------------------------------------------------------------------


def test_every_option_of_every_command_has_a_test_of_its_effect() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    untested = {command: options_of(command) - SHOWN.get(command, set()) for command in commands}
    assert {command: names for command, names in untested.items() if names} == {}
    unknown = {
        command: SHOWN[command] - options_of(command) for command in SHOWN if command in commands
    }
    assert {command: names for command, names in unknown.items() if names} == {}


# --- estimators -----------------------------------------------------------------------------------

ESTIMATOR: dict[str, Any] = {
    "channel": Noise(1.0),
    "defense": "reactive",
    "eps": [0.1, 0.2, 0.3, 4.0],
    "units": "raw",
    "norm": "linf",
    "indicators": [(1, 0)],
    "sigma": 1.5,
    "posterior": "ensemble",
    "abstain": 0.6,
    "net": nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "hidden": (3,),
    "event_shape": (2, 2),
    "prior_scale": 0.05,
    "kl_weight": 20.0,
    "epochs": 4,
    "batch_size": 16,
    "lr": 0.1,
    "decay": 1.0,
    "init_scale": 0.5,
    "class_weight": {False: 1.0, True: 5.0},
    "num_thetas": 3,
    "random_state": 1,
}


def test_every_argument_of_the_estimators_has_a_test_of_its_effect() -> None:
    assert set(ESTIMATOR) == set(RobustClassifier().get_params())
    regression = set(ESTIMATOR) - {"class_weight"} | {"noise_scale"}
    assert regression == set(RobustRegressor().get_params())


@pytest.mark.parametrize("noise_scale", [0.01, "heteroscedastic"])
def test_the_noise_of_the_regressor_has_its_effect(noise_scale: Any) -> None:
    x = 5 * np.random.default_rng(0).normal(size=(60, 4))
    plain, other = (
        RobustRegressor(noise_scale=given, epochs=5, random_state=0).fit(x, x[:, 0])
        for given in ("learned", noise_scale)
    )
    before, after = (estimator.predict(x, return_std=True)[1] for estimator in (plain, other))
    assert not np.allclose(before, after, rtol=1e-3)
    assert after.min() < 1 if noise_scale == 0.01 else after.std() > 2 * before.std()


@pytest.mark.parametrize("argument", ESTIMATOR)
def test_an_argument_of_the_estimators_has_its_effect(argument: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 4))
    x *= [1, 2, 3, 4]
    settings: dict[str, Any] = {"epochs": 2, "random_state": 0, "hidden": (4,)}
    if argument in ("eps", "units", "norm", "indicators", "sigma", "defense"):
        settings["channel"] = "os"
    if argument == "event_shape":  # the net sees images
        settings["net"] = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 2))
        with pytest.raises(RuntimeError):
            RobustClassifier(**settings).fit(x, x[:, 0] > 0)
        assert RobustClassifier(**settings | {"event_shape": (1, 2, 2)}).fit(
            x, x[:, 0] > 0
        ).predict_proba(x).shape == (60, 2)
        return
    plain, other = (
        RobustClassifier(**given).fit(x, x[:, 0] > 0)
        for given in (settings, settings | {argument: ESTIMATOR[argument]})
    )
    if argument == "abstain":
        assert None not in plain.predict(x)
        assert 0 < sum(value is None for value in other.predict(x)) < 60
        return
    assert not np.allclose(plain.predict_proba(x), other.predict_proba(x), rtol=1e-6)
    seen: dict[str, Callable[[], bool]] = {
        "units": lambda: other.ball_.scale is None and plain.ball_.scale is not None,
        "eps": lambda: np.allclose(other.ball_.scale, np.array([0.1, 0.2, 0.3, 4.0]) * x.std(0)),
        "norm": lambda: str(other.ball_).startswith("Linf"),
        "indicators": lambda: other.ball_.indicators[0][:2] == (1, 0),
        "posterior": lambda: len(other.predictor_.thetas) == 5,
        "hidden": lambda: other.model_.num_params == 4 * 3 + 3 + 3 * 2 + 2,
        "net": lambda: other.model_.num_params == 4 * 3 + 3 + 3 * 2 + 2,
        "prior_scale": lambda: other.model_.prior_scale == 0.05,
        "epochs": lambda: other.result_.steps == 4,
        "batch_size": lambda: other.result_.steps == 8,
        "num_thetas": lambda: len(other.predictor_.thetas) == 3,
    }
    assert seen.get(argument, lambda: True)()
