"""The report: what it says, that it is the same twice, that nothing from outside is live in it,
that a browser shows it."""

from __future__ import annotations

import csv
import hashlib
import html as entities
import io
import json
import math
import re
import shutil
import subprocess
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Classes
from torch.distributions import Normal

from advbayes import L2, Linf, one_step, pgd, squared_error
from advbayes.datasets import Standardize
from advbayes.evaluation import Cell, Evaluation, evaluate
from advbayes.report import (
    Gallery,
    ReportPaths,
    View,
    gather,
    make_gallery,
    report_run,
    report_runs,
    write_report,
)
from advbayes.report.figures import security_curves
from advbayes.report.gather import MANDATORY
from advbayes.report.pictures import png
from advbayes.report.telling import facts, headline, trained
from advbayes.report.text import clean
from advbayes.report.text import inert_markdown as markdown
from advbayes.report.write import by_name

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "</svg><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "--><script>alert(1)</script>",
    "<!--",
    "]]><script>alert(1)</script>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    '" style="background:url(http://evil.example/x)',
    "<iframe src=//evil.example></iframe>",
    "<a href='javascript:alert(1)'>x</a>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example><input name=p>",
    "<math><mi xlink:href='javascript:alert(1)'>x</mi></math>",
    "<details open ontoggle=alert(1)>",
    "<object data=x></object>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "vbscript:msgbox(1)",
    "{{ 7 * 7 }}",
    "{% include '/etc/passwd' %}",
    "{{ ''.__class__.__mro__ }}",
    "${7*7}",
    "$\\frac{1}{0}$",
    "$\\href{javascript:alert(1)}{x}$",
    "[x](javascript:alert(1))",
    "![x](http://evil.example/x.png)",
    "[x]: http://evil.example",
    "<http://evil.example>",
    "https://evil.example/x",
    "www.evil.example",
    "# heading",
    "**bold** _it_ `code`",
    "| a | b |",
    "a|b\\|c",
    "```\n<script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    "+1+1",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "-2+3\u202egnp.exe\u0000\x1b[31m\u2028x",
)


# --- things to report on ------------------------------------------------------------------------


def slope(weight: float) -> Any:
    return lambda x: Classes(
        logits=weight
        * torch.stack([x.flatten(1).mean(1), -x.flatten(1).mean(1), 0.1 * x.flatten(1)[:, 0]], 1)
    )


def line(x: Tensor) -> Normal:
    return Normal(x.sum(1), torch.full((len(x),), 0.5))


def image_data() -> tuple[Tensor, Tensor]:
    x = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.flatten(1).mean(1) < 0.5).long()


@lru_cache
def image_evaluation() -> Evaluation:
    ball = L2(1.0, box=(0, 1))
    attacks = {"c": one_step(ball), "d": pgd(ball, steps=4)}
    return evaluate(
        {"a": slope(8.0), "b": slope(3.0)}, image_data(), attacks=attacks, radii=(0.5, 1.0)
    )


@lru_cache
def table_evaluation() -> Evaluation:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
    return evaluate(
        {"wine": line}, (x, x.sum(1) + 0.1), attacks={"PGD": pgd(Linf(0.5), 3, squared_error)}
    )


def image_case(**names: Any) -> dict[str, Any]:
    """A whole report's arguments: two predictors, two attacks, two radii, an audit, a gallery."""
    x, y = image_data()
    predictors = dict(
        zip(names.get("predictors", ("plain", "MIX")), (slope(8.0), slope(3.0)), strict=True)
    )
    first, second = names.get("attacks", ("one step", "PGD"))
    ball = L2(1.0, box=(0, 1))
    attack, found = pgd(ball, steps=4), image_evaluation()
    told = dict(zip("abcd", (*predictors, first, second), strict=True))
    cells = {
        Cell(told.get(c.predictor, c.predictor), told.get(c.attack, c.attack), c.eps): rows
        for c, rows in found.cells.items()
    }
    config = {**found.config, "attacks": {told[k]: v for k, v in found.config["attacks"].items()}}
    attacked = {
        second: {name: attack(predict, x[:3], y[:3]) for name, predict in predictors.items()}
    }
    return {
        "title": names.get("title", "Two predictors"),
        "evaluation": Evaluation(found.task, cells, found.trivial, config),
        "audit": {list(predictors)[1]: verdict(advice=names.get("advice", "run more steps"))},
        "threat_model": {
            "norm": "L2",
            "eps": 1.0,
            "units": "raw",
            "knowledge": names.get("knowledge", "no thetas"),
        },
        "run": run(names.get("run", "MIX"), seconds=1.0),
        "history": {name: {"bound": [-9.0, -5.0, math.nan, -4.0]} for name in predictors},
        "gallery": make_gallery(predictors, x, y, attacked, eps=1.0, num=3),
        "class_names": names.get("classes", ("low", "high", "odd")),
        "reproduce": {"commands": [names.get("command", "advbayes demo --seed 0")]},
    }


@lru_cache
def image_case_once() -> dict[str, Any]:
    return image_case()


def run(name: str, *, seconds: float) -> dict[str, Any]:
    config = {
        "data": name,
        "defense": "mix",
        "posterior": "mean_field",
        "network": "conv",
        "epochs": 2.0,
        "eps": 1.0,
        "norm": "l2",
    }
    started = {
        "command": ["/usr/bin/advbayes", "train", "--out", name],
        "commit": "abc123",
        "machine": f"box {seconds}",
    }
    manifest = {
        "started": started,
        "versions": {"torch": "2.13.0"},
        "steps": 4,
        "seconds": seconds,
        "weights": "ff" * 32,
    }
    return {
        name: {"config": {**config, "root": f"/tmp/{seconds}", "seed": 3}, "manifest": manifest}
    }


def verdict(
    level: str = "C", *, failed: tuple[str, ...] = ("E6",), advice: str = "run more steps"
) -> dict[str, Any]:
    def finding(id: str) -> dict[str, Any]:
        status = "failed" if id in failed else "passed"
        return {
            "id": id,
            "title": f"check {id}",
            "status": status,
            "figures": {"x": 0.25},
            "advice": advice,
            "mandatory": True,
        }

    return {
        "level": level,
        "tier": "standard",
        "certified": False,
        "summary": {},
        "findings": [finding(id) for id in MANDATORY],
    }


def table_case(features: tuple[str, ...] = ("alcohol", "acidity", "sugar")) -> dict[str, Any]:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1) + 0.1
    attack = pgd(Linf(0.5), 3, squared_error)
    return {
        "title": "Wine",
        "evaluation": table_evaluation(),
        "audit": {"wine": verdict("B", failed=())},
        "gallery": make_gallery(
            {"wine": line}, x, y, {"PGD": {"wine": attack(line, x[:2], y[:2])}}, eps=0.5, num=2
        ),
        "feature_names": features,
        "scaling": Standardize(
            torch.tensor([10.0, 0.5, 2.0], dtype=torch.float64),
            torch.tensor([2.0, 0.1, 4.0], dtype=torch.float64),
            torch.tensor(5.0),
            torch.tensor(3.0),
        ),
    }


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    return write_report(tmp_path_factory.mktemp("images"), **image_case())


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    return write_report(tmp_path_factory.mktemp("features"), **table_case())


class Page(HTMLParser):
    """Elements with their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attributes)) for tag, attributes in self.elements]

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


# --- what it says -------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_evaluation(images: ReportPaths) -> None:
    found = image_case()["evaluation"]
    document = json.loads(images.json.read_text())
    assert document["eps"] == 1.0
    for row in document["table"]:
        attack = "clean" if row["kind"] == "trivial" else row["attack"]
        for metric, shown in row["values"].items():
            wanted = found.estimate(
                metric, row["predictor"], attack, None if row["kind"] == "trivial" else row["eps"]
            )
            assert (shown["value"], shown["low"], shown["high"]) == (
                wanted.value,
                wanted.low,
                wanted.high,
            )
    assert {row["predictor"] for row in document["table"]} == {
        "plain",
        "MIX",
        "uniform",
        "majority",
    }
    assert len(document["table"]) == 2 * (1 + 2 * 3) + 2
    worst = next(
        row
        for row in document["table"]
        if (row["predictor"], row["attack"], row["eps"]) == ("MIX", "worst", 1.0)
    )
    page = Page(images.html.read_text()).words
    value = worst["values"]["accuracy"]
    assert (
        f"{100 * value['value']:.1f}†{100 * value['low']:.1f} to {100 * value['high']:.1f}" in page
    )


@pytest.mark.parametrize(
    ("audit", "daggers"),
    [
        ({}, {"plain", "MIX"}),
        ({"MIX": verdict("B", failed=())}, {"plain"}),
        ({"MIX": verdict("A", failed=()), "plain": verdict("B", failed=())}, set()),
        ({"MIX": verdict("C")}, {"plain", "MIX"}),
        ({"MIX": verdict("D")}, {"plain", "MIX"}),
        (None, {"plain", "MIX"}),
        (verdict("B", failed=()), {"MIX"}),  # of the first predictor
        # most was never asked for
        ({"MIX": {**verdict("B"), "findings": verdict("B")["findings"][:3]}}, {"plain", "MIX"}),
    ],
)
def test_a_dagger_stands_at_what_is_not_to_be_believed(audit: Any, daggers: set[str]) -> None:
    evaluation = image_case_once()["evaluation"]
    given = by_name({"audit": audit}, evaluation.predictors[0])
    document = gather(title="t", evaluation=evaluation, **given)
    marked = {row["predictor"] for row in document["table"] if row["dagger"]}
    assert marked == daggers
    for row in document["table"]:
        if row["predictor"] in daggers:
            assert row["dagger"] == (row["kind"] != "clean")
    assert {row["predictor"] for row in document["summary"] if not row["believed"]} == daggers


# all but E25, E26 (without a detector) and E23, E24 (without a purifier)
@pytest.mark.parametrize("left_out", [*(f"E{i}" for i in range(23)), "E27", "E28", "E29", "E30"])
def test_a_mandatory_check_that_was_never_asked_for_did_not_pass(left_out: str) -> None:
    asked = verdict("B", failed=())
    asked["findings"] = [each for each in asked["findings"] if each["id"] != left_out]
    document = gather(title="t", evaluation=image_case_once()["evaluation"], audit={"MIX": asked})
    assert document["audit"]["MIX"]["never_asked"] == [left_out]
    assert not any(row["believed"] for row in document["summary"] if row["predictor"] == "MIX")


def test_the_verdict_is_told_in_words_with_advice(images: ReportPaths) -> None:
    for said in (Page(images.html.read_text()).words, images.markdown.read_text()):
        assert "level C" in said
        assert "not audited" in said
        assert "E6 check E6" in said
        assert "run more steps" in said
        assert "true robustness may be lower" in said


def test_the_page_holds_every_part(images: ReportPaths) -> None:
    page = Page(images.html.read_text())
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {
        "short",
        "verdict",
        "results",
        "curves",
        "calibration",
        "abstention",
        "examples",
        "threat",
        "training",
    } <= ids
    assert "reproduce" in ids
    assert "advbayes demo --seed 0" in page.words
    assert "ε = 1 (L2)" in page.words
    assert "2.13.0" in page.words
    assert images.digest in page.words


def test_units_are_raw_and_standardised(features: ReportPaths) -> None:
    document = json.loads(features.json.read_text())
    first = document["gallery"]["examples"][0]
    for row in first["features"]["rows"]:
        spread = {"alcohol": 2.0, "acidity": 0.1, "sugar": 4.0}[row["name"]]
        assert row["changes"][0] == pytest.approx(spread * row["standardised"][0])
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
    assert first["truth"] == pytest.approx(5 + 3 * (float(x[0].sum()) + 0.1), rel=1e-5)
    page = Page(features.html.read_text()).words
    assert "in standard deviations of each feature" in page
    assert "alcohol1021" in page.replace(" ", "")  # mean 10, standard deviation 2, eps 0.5 of them
    assert "RMSE, in the target's unit" in page
    assert "L∞" in page


@pytest.mark.parametrize(
    ("trained", "threat", "eps"),
    [
        ((), None, 1.0),  # the largest of 0.5 and 1
        ((0.5,), None, 0.5),
        ((1.0,), None, 1.0),
        ((0.5, 0.5), None, 0.5),
        ((0.5, 1.0), None, 1.0),
        ((0.3,), None, 1.0),
        ((1.0,), {"eps": 0.5}, 0.5),
        ((0.5,), {"eps": 0.3}, 1.0),
    ],
)
def test_the_summary_is_about_the_radius_trained_for_or_the_largest(
    trained: tuple[float, ...], threat: dict[str, float] | None, eps: float
) -> None:
    runs = {f"run {k}": {"config": {"eps": each}, "manifest": {}} for k, each in enumerate(trained)}
    document = gather(title="t", evaluation=image_evaluation(), run=runs, threat_model=threat or {})
    assert document["eps"] == eps
    assert document["threat_model"]["eps"] == (threat or {"eps": eps})["eps"]
    assert document["threat_model"]["radii"] == [0.5, 1.0]
    for row in document["summary"]:
        wanted = image_evaluation().estimate("accuracy", row["predictor"], "worst", eps)
        assert row["worst"]["value"] == wanted.value


@pytest.mark.parametrize(
    ("changes", "adversary", "noise"),
    [
        ({"defense": "none"}, False, False),
        ({"defense": "noise"}, False, True),
        ({"defense": "consistency"}, False, True),
        ({"defense": "at"}, True, False),
        ({"defense": "pgd"}, True, True),
        ({"channel": "mine:make"}, True, True),
    ],
)
def test_a_run_is_said_to_have_had_the_adversary_and_the_noise_that_it_had(
    changes: dict[str, str], adversary: bool, noise: bool
) -> None:
    document = gather(title="t", evaluation=image_evaluation(), run=run("MIX", seconds=1.0))
    config = {**document["runs"][0]["config"], "sigma": 0.25, **changes}
    (said,) = trained({"runs": [{**document["runs"][0], "config": config}]})
    assert ("the training adversary had L2 ε = 1" in said) is adversary
    assert ("noise σ = 0.25" in said) is noise
    assert ("through mine:make" in said) is ("channel" in changes)
    assert "a mixture of noise" not in said


def test_a_fact_is_left_out_where_it_is_unknown_and_not_where_it_is_zero() -> None:
    document = gather(title="t", evaluation=image_evaluation(), run=run("MIX", seconds=1.0))
    for seed, told in ((0, "0"), (7, "7"), (None, None)):
        known = dict(facts({**document, "seed": seed}, {"machine": None, "folder": ""}))
        assert known.get("Seed of the evaluation") == told
        assert known["Seed of the training"] == "3"
        assert not {"Machine", "Run"} & known.keys()
    for each in document["runs"]:
        each["config"]["seed"] = 0
    known = dict(facts(document, {"machine": "m", "folder": "f", "commit": "c"}))
    assert (known["Seed of the training"], known["Machine"], known["Run"], known["Commit"]) == (
        "0",
        "m",
        "f",
        "c",
    )


def test_only_what_is_there_is_told(tmp_path: Path) -> None:
    x, y = image_data()
    paths = write_report(
        tmp_path,
        title="bare",
        evaluation=evaluate(slope(2.0), (x, y), attacks={"PGD": pgd(L2(0.5), steps=2)}),
    )
    ids = {attributes.get("id") for _, attributes in Page(paths.html.read_text()).elements}
    assert not {"examples", "training"} & ids


def test_csv_is_a_table_of_numbers(images: ReportPaths) -> None:
    rows = list(csv.DictReader(io.StringIO(images.csv.read_text(encoding="utf-8"))))
    document = json.loads(images.json.read_text())
    assert len(rows) == len(document["table"]) * len(document["metrics"])
    assert float(rows[0]["value"]) == document["table"][0]["values"][rows[0]["metric"]]["value"]
    assert {row["believed"] for row in rows} == {"yes", "no"}


def test_png_is_what_was_given() -> None:
    from PIL import Image

    grey = torch.tensor([[[0.0, 1.0], [0.5, 2.0]]])
    with Image.open(io.BytesIO(png(grey))) as image:
        assert (image.format, image.mode, list(image.tobytes())) == ("PNG", "L", [0, 255, 128, 255])
    with Image.open(io.BytesIO(png(torch.eye(3)[:, :, None]))) as image:
        assert (image.mode, image.size, list(image.tobytes())) == (
            "RGB",
            (1, 3),
            [255, 0, 0, 0, 255, 0, 0, 0, 255],
        )


def test_bad_galleries_and_audits_are_refused() -> None:
    x, y = image_data()
    with pytest.raises(ValueError, match="y must hold one target for each"):
        Gallery(x, y[:1])
    with pytest.raises(ValueError, match="prediction must have one row"):
        View("a", "PGD", x, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="audit must be a Verdict or its JSON"):
        gather(title="t", evaluation=image_case_once()["evaluation"], audit={"MIX": {"level": "B"}})


# --- the same twice -----------------------------------------------------------------------------


def test_two_runs_of_one_seed_have_the_same_json(images: ReportPaths, tmp_path: Path) -> None:
    image_evaluation.cache_clear()  # attacked and scored again
    again = image_case()
    again["run"] = run("MIX", seconds=2.0)  # another machine, another folder, another duration
    again["reproduce"] = {"commands": ["advbayes demo --seed 0 --out elsewhere"]}
    paths = write_report(tmp_path, **again)
    assert (
        hashlib.sha256(paths.json.read_bytes()).hexdigest()
        == hashlib.sha256(images.json.read_bytes()).hexdigest()
    )
    assert paths.digest == hashlib.sha256(paths.json.read_bytes()).hexdigest()
    assert "elsewhere" in paths.html.read_text()
    again["evaluation"] = evaluate(slope(7.0), image_data(), attacks={"PGD": pgd(L2(0.5), steps=2)})
    assert write_report(tmp_path / "b", **again).digest != paths.digest


def test_the_page_is_the_same_twice(images: ReportPaths, tmp_path: Path) -> None:
    paths = write_report(tmp_path, **image_case())
    for one, other in (
        (paths.html, images.html),
        (paths.markdown, images.markdown),
        (paths.csv, images.csv),
    ):
        assert one.read_bytes() == other.read_bytes()


# --- nothing from outside is live ---------------------------------------------------------------


def test_there_are_fifty_hostile_strings() -> None:
    assert len(set(HOSTILE)) >= 50


ALLOWED_ADDRESSES = re.compile(r"#[a-zA-Z0-9_.-]+|data:image/png;base64,[A-Za-z0-9+/=]+")


def check_dead(page: Page) -> None:
    """No script, handler, outside address or style from outside."""
    for tag, attributes in page.elements:
        assert tag not in (
            "script",
            "iframe",
            "object",
            "embed",
            "form",
            "input",
            "link",
            "base",
            "math",
            "foreignobject",
        ), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "action", "data", "xlink:href", "srcset", "poster"):
                assert ALLOWED_ADDRESSES.fullmatch(value or ""), (tag, name, value)
            if name == "style":
                assert "http" not in (value or "")
                assert not re.search(r"url\((?!#)", value or "")


def hostile_case(string: str) -> dict[str, Any]:
    return image_case(
        title=string,
        predictors=(f"{string}1", f"{string}2"),
        attacks=(f"{string}3", f"{string}4"),
        classes=(string, f"{string}5", "c"),
        run=f"{string}6",
        command=string,
        knowledge=string,
        advice=string,
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Neither bootstraps nor drawings hang on names (figures have them in title and description
    alone): make them once."""
    from advbayes.evaluation.result import REDUCTIONS
    from advbayes.report import figures

    monkeypatch.setitem(REDUCTIONS["classification"], "ece", REDUCTIONS["classification"]["brier"])
    monkeypatch.setitem(REDUCTIONS["classification"], "aurc", REDUCTIONS["classification"]["brier"])
    monkeypatch.setitem(REDUCTIONS["regression"], "rmse", REDUCTIONS["regression"]["crps"])
    monkeypatch.setitem(REDUCTIONS["regression"], "aurc", REDUCTIONS["regression"]["crps"])
    real, state = figures.draw, {"case": ""}

    def draw(paint: Any, *, name: str, title: str, description: str, **size: Any) -> str:
        key = state["case"], name
        if key not in DRAWN:
            DRAWN[key] = real(
                paint, name=name, title="@title@", description="@description@", **size
            )
        return (
            DRAWN[key]
            .replace("@title@", entities.escape(title))
            .replace("@description@", entities.escape(description))
        )

    monkeypatch.setattr(figures, "draw", draw)
    return state


DRAWN: dict[tuple[str, str], str] = {}
PLAIN: dict[str, list[Any]] = {}  # the elements of pages whose names are harmless


@pytest.mark.parametrize("string", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_add_nothing_to_the_page(
    string: str, tmp_path: Path, quick: dict[str, str]
) -> None:
    cases = {
        "images": hostile_case,
        "features": lambda name: table_case(features=(name, f"{name}1", f"{name}2")),
    }
    for case, make in cases.items():
        quick["case"] = case
        if case not in PLAIN:
            PLAIN[case] = Page(
                write_report(tmp_path / "plain", **make("plain")).html.read_text()
            ).shape
        other = write_report(tmp_path / case, **make(string))
        page = Page(other.html.read_text(encoding="utf-8"))
        check_dead(page)
        assert page.shape == PLAIN[case]  # not an element, not an attribute more
        # as text, and whole: nothing was computed or cut out
        assert " ".join(clean(string).split()) in page.words
        check_markdown(other.markdown.read_text(encoding="utf-8"))
        check_csv(other.csv)
    results = (tmp_path / "images" / "report.json").read_text(encoding="utf-8")
    assert "<" not in results
    assert json.loads(results)["title"] == clean(string)


def check_markdown(text: str) -> None:
    """What remains after taking the escapes away must have no markup but our own."""
    assert "<" not in text
    body = re.sub(r"\\.|&#?\w+;", "", re.sub(r"(?m)^    .*$", "", text))  # indented lines are code
    for mark in ("](", "![", "]:", "~~", "$", "@"):
        assert mark not in body, mark
    assert not re.search(r"(?i)\b(https?|javascript|data|vbscript|mailto):\S", body)
    assert not re.search(r"(?i)www\.", body)
    columns = None
    for row in body.splitlines():
        if row.startswith("# "):
            assert row.count("#") == 1
        if row.startswith("|"):  # every row of a table has as many cells as its head
            columns = row.count("|") if columns is None else columns
            assert row.count("|") == columns
        else:
            columns = None


def check_csv(path: Path) -> None:
    for row in csv.reader(io.StringIO(path.read_text(encoding="utf-8"))):
        assert len(row) == 10
        for cell in row:
            number = re.fullmatch(r"-?\d+(\.\d+)?(e[-+]\d+)?", cell)
            assert number or not re.match(r"[=+\-@\t\r|%]", cell), cell


def test_figures_escape_what_they_are_called(tmp_path: Path) -> None:
    """The real drawing, not the quick one of the test above."""
    string = "".join(HOSTILE[:6]) + "$x^2$ & "
    paths = write_report(tmp_path, **image_case(title=string, predictors=(string, f"{string}2")))
    page = Page(paths.html.read_text(encoding="utf-8"))
    check_dead(page)
    drawn = [
        attributes
        for tag, attributes in page.elements
        if tag == "svg" and attributes.get("class") == "figure"
    ]
    assert len(drawn) == 7


def test_hidden_characters_are_spelled_out() -> None:
    assert clean("a\u202eb\u200b\x1b\ud800") == "a\\u202eb\\u200b\\u001b\\ud800"
    assert len(clean("x" * 9999)) == 160
    assert markdown("a\n# b") == "a \\# b"


def test_the_page_asks_nobody_for_anything(images: ReportPaths, features: ReportPaths) -> None:
    for paths in (images, features):
        text = paths.html.read_text()
        assert "http://" not in text
        assert "https://" not in text
        assert "//" not in re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
        assert "@import" not in text
        check_dead(Page(text))


def test_figures_have_alternative_text(images: ReportPaths) -> None:
    page = Page(images.html.read_text())
    ids = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    figures = 0
    for tag, attributes in page.elements:
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            if attributes.get("aria-hidden") == "true":
                continue
            assert attributes["role"] == "img"
            labels = (attributes.get("aria-labelledby") or "").split()
            assert attributes.get("aria-label") or (len(labels) == 2 and set(labels) <= set(ids))
            figures += 1
    assert figures > 7


# --- run folders --------------------------------------------------------------------------------


def trained_run(folder: Path, defense: str, seed: int = 0) -> Path:
    pytest.importorskip("pydantic")
    pytest.importorskip("sklearn")
    from advbayes.runs import create_run, load_trained, prepare, train
    from advbayes.runs.config import make_config

    config = make_config(
        {
            "data": "digits",
            "defense": defense,
            "epochs": 0.2,
            "network": "mlp",
            "hidden": [8],
            "seed": seed,
        }
    )
    with create_run(config, folder) as made:
        train(made)
    model, data = load_trained(folder), prepare(config)
    ball = L2(1.0, box=(0, 1))
    evaluate(
        {defense: model.predict()},
        (data.x_test[:24], data.y_test[:24]),
        attacks={"pgd": pgd(ball, steps=3), "pgd1": one_step(ball)},
        radii=(0.5, 1.0),
        out=folder / "evaluation" / "small",
    )
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("runs") / "first", "mix")


def test_a_run_folder_becomes_a_report_twice_the_same(run_folder: Path, tmp_path: Path) -> None:
    first = report_run(run_folder)
    assert first.html.parent == run_folder / "report"
    second = report_run(trained_run(tmp_path / "second", "mix"), tmp_path / "out")
    assert first.json.read_bytes() == second.json.read_bytes()
    document = json.loads(first.json.read_text())
    assert document["predictors"] == ["mix"]
    assert document["gallery"]["kind"] == "images"
    assert len(document["gallery"]["examples"]) == 6
    assert document["training"][0]["steps"] > 0
    page = Page(first.html.read_text()).words
    assert "mix on digits" in page
    assert "Not audited" in page or "not audited" in page


def test_the_audit_of_a_run_is_told(run_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    (copy / "audit.json").write_text(json.dumps(verdict("B", failed=())))
    document = json.loads(report_run(copy, tmp_path / "out").json.read_text())
    assert document["audit"]["mix"]["level"] == "B"
    assert not any(row["dagger"] for row in document["table"])


def test_what_an_audit_evaluates_is_no_second_predictor(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from advbayes.auditing import Verdict
    from advbayes.runs import Run, load_trained, prepare, verdict

    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    monkeypatch.setattr(verdict, "audit", lambda *_, tier, **__: Verdict((), tier))
    run, trained = Run.open(copy), load_trained(copy)
    with run.lock():
        verdict.audit_run(run, trained, prepare(run.config), L2(0.7, box=(0, 1)), num=24, seed=3)
    paths = report_run(copy, tmp_path / "out")
    document = json.loads(paths.json.read_text())
    assert document["predictors"] == ["mix"]
    assert document["audit"].keys() == {"mix"}
    command = f"advbayes audit {copy} --eps 0.7 --norm l2 --num 24 --thetas 20 --seed 3"
    assert command in Page(paths.html.read_text()).words


def test_several_runs_are_compared(run_folder: Path, tmp_path: Path) -> None:
    other = trained_run(tmp_path / "none", "none")
    document = json.loads(report_runs([run_folder, other], tmp_path / "out").json.read_text())
    assert document["predictors"] == ["mix", "none"]
    assert [one["name"] for one in document["gallery"]["examples"][0]["predictors"]] == [
        "mix",
        "none",
    ]


def test_a_run_that_was_not_evaluated_says_what_to_do(run_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    shutil.rmtree(copy / "evaluation")
    with pytest.raises(ValueError, match="advbayes evaluate"):
        report_run(copy)


def test_an_axis_of_many_sizes_has_plain_numbers() -> None:
    values = {0.0: 0.1, 0.5: 1.0, 1.0: 4.0}
    points = [
        {"eps": eps, "value": v, "low": 0.9 * v, "high": 1.1 * v} for eps, v in values.items()
    ]
    curve = {"metric": "nll", "predictor": "a", "attack": "worst", "points": points}
    document = {"curves": [curve], "predictors": ["a"], "threat_model": {}, "table": []}
    (figure,) = security_curves({**document, "task": "classification", "scaling": None})
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    assert {"0.1", "0.2", "0.5", "1", "2"} <= set(ticks)
    assert not any("$" in tick or "10^" in tick for tick in ticks)


# --- in a browser -------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
]
# Each page in a frame of its own width; all closed parts opened; the widths and whatever sticks out
# are written into the page.
MEASURE = """
const said = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument;
  for (const each of page.querySelectorAll("details")) each.open = true;
  const width = page.documentElement.clientWidth;
  const out = [...page.querySelectorAll("body *")]
    .filter((each) => !each.closest(".scroll, pre") || each.matches(".scroll, pre"))
    .filter((each) => {
      const box = each.getBoundingClientRect();
      return box.width && (box.right > width + 1 || box.left < -1); })
    .map((each) => each.tagName + "." + each.getAttribute("class"));
  const empty = [...page.querySelectorAll("svg.figure, img")]
    .filter((each) => each.getBoundingClientRect().height < 20).length;
  const cut = [...page.querySelectorAll('[aria-label="Summary"]')]
    .filter((each) => each.scrollWidth > each.clientWidth).length;
  said.push({name: frame.name, width, cut, scroll: page.documentElement.scrollWidth,
    out: out.slice(0, 5), empty,
    paper: page.defaultView.getComputedStyle(page.body).backgroundColor});
}
document.getElementById("said").textContent = JSON.stringify(said);
"""


def shown(pages: dict[str, str], folder: Path, *, dark: bool) -> tuple[list[dict[str, Any]], str]:
    frames = [
        f'<iframe name="{name} {width}" style="border:0;width:{width}px;height:900px" '
        f'srcdoc="{entities.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in (360, 390, 1280)
    ]
    wrapper = folder / f"measure{dark}.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><body>{"".join(frames)}<pre id="said"></pre>'
        f'<script>addEventListener("load", () => {{ {MEASURE} }});</script>',
        encoding="utf-8",
    )
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [
        str(CHROMIUM),
        *FLAGS,
        *scheme,
        f"--user-data-dir={folder / f'profile{dark}'}",
        "--dump-dom",
        wrapper.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(entities.unescape(found.group(1))), done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_it_at_phone_and_desktop_width(
    images: ReportPaths, features: ReportPaths, tmp_path: Path
) -> None:
    long = write_report(
        tmp_path,
        **image_case(
            title="W" * 300, predictors=("M" * 200, "<b>" * 90), classes=("x" * 99, "b", "c")
        ),
    )
    pages = {
        name: paths.html.read_text()
        for name, paths in (("images", images), ("features", features), ("long", long))
    }
    light, logged = shown(pages, tmp_path, dark=False)
    darkened, also_logged = shown(pages, tmp_path, dark=True)
    assert len(light) == len(darkened) == 9
    for found in (*light, *darkened):
        assert found["out"] == [], found
        assert found["scroll"] <= found["width"], found
        assert found["empty"] == 0, found
        # the summary is seen whole; longer tables are scrolled, a shadow at their edge
        assert found["cut"] == 0 or found["name"].startswith("long"), found
    assert {found["paper"] for found in light} == {"rgb(255, 255, 255)"}
    assert not {found["paper"] for found in darkened} & {found["paper"] for found in light}
    assert "CONSOLE" not in logged + also_logged, (logged + also_logged)[-2000:]


def test_predictions_that_cannot_say_everything_are_reported(tmp_path: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    evaluation = evaluate(
        lambda x: torch.distributions.StudentT(5.0, x[:, 0], 0.3),
        (x, x[:, 0] + 0.1),
        attacks={"PGD": pgd(L2(0.5), steps=2, loss=squared_error)},
    )
    paths = write_report(tmp_path, title="heavy tails", evaluation=evaluation)
    document = json.loads(paths.json.read_text())
    ours = [row for row in document["table"] if row["kind"] != "trivial"]
    assert all(
        row["values"]["coverage"]["value"] is None and row["values"]["rmse"]["value"] > 0
        for row in ours
    )


def test_a_headline_says_where_a_constant_is_no_worse() -> None:
    """Untouched, under attack alone, or nowhere: a classifier and a regression."""
    x = torch.tensor([[2.0], [-0.5], [3.0], [4.0]])
    y = torch.tensor([0, 1, 0, 0])

    def classes(sign: float, x: Tensor) -> Any:
        return Classes(logits=sign * torch.stack([x[:, 0], -x[:, 0]], 1))

    predictors = {"good": lambda x: classes(1.0, x), "bad": lambda x: classes(-1.0, x)}
    attacks = {"PGD": pgd(L2(1.0), steps=5)}
    good, bad = headline(
        gather(title="t", evaluation=evaluate(predictors, (x, y), attacks=attacks))
    )
    assert good.endswith(
        "Under attack it is no better than majority, which never looks at the input (75.0 %)."
    )
    assert bad.endswith(
        ") under the worst attack at ε = 1 (L2). It is no better than majority, which never looks "
        "at the input (75.0 %)."
    )
    line = {"line": lambda x: Normal(x[:, 0], 1.0)}
    (said,) = headline(gather(title="t", evaluation=evaluate(line, (x, x[:, 0]), attacks=attacks)))
    assert "no better" not in said
    (said,) = headline(gather(title="t", evaluation=evaluate(line, (x, -x[:, 0]), attacks=attacks)))
    assert "It is no better than constant, which never looks at the input (1.6" in said
