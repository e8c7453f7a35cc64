"""The playground: worlds, moves and pictures without streamlit; the page headless."""

from __future__ import annotations

import socket
from base64 import b64decode
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from advbayes.cli import main
from advbayes.cli.experiments import PAGE, command
from advbayes.experiments import playground
from advbayes.experiments.playground import Answer, World, load_world, move, pictures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[str, World]:
    """Of one epoch each, with scikit-learn's wines: no file of the red ones is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVBAYES_DATA", str(folder))
        patch.setenv("ADVBAYES_CACHE", str(folder))
        return {
            name: load_world(name, folder / "playground", epochs=1) for name in playground.WORLDS
        }


@pytest.fixture(scope="module")
def red(worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory) -> World:
    """A regression world of the same kind: the diabetes table."""
    from advbayes.experiments.playground import worlds as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_wine", lambda place: {"data": "diabetes"})
        return load_world("wine", tmp_path_factory.mktemp("red"), epochs=1)


def example(world: World, number: int = 0) -> tuple[Tensor, Tensor]:
    return world.data.x_test[number], world.data.y_test[number]


def drawn(image: str) -> ElementTree.Element:
    """The picture inside an `<img>`."""
    root = ElementTree.fromstring(image.replace(">", "/>"))
    return ElementTree.fromstring(b64decode(root.attrib["src"].partition("base64,")[2]))


def rectangles(image: str) -> list[dict[str, str]]:
    return [each.attrib for each in drawn(image).iter("{http://www.w3.org/2000/svg}rect")]


def test_models_are_trained_once_and_kept_without_pickle(
    worlds: dict[str, World], folder: Path
) -> None:
    bundles = sorted((folder / "playground").rglob("model.advbayes"))
    assert len(bundles) == 6  # three for each of the two worlds
    before = [each.stat().st_mtime_ns for each in bundles]
    again = load_world("digits", folder / "playground", epochs=1)
    assert [each.stat().st_mtime_ns for each in bundles] == before
    x = again.data.x_test[:3]
    for name, predict in again.predictors.items():
        assert torch.equal(predict(x).probs, worlds["digits"].predictors[name](x).probs)  # type: ignore[attr-defined]
    suffixes = {each.suffix for each in (folder / "playground").rglob("*") if each.is_file()}
    assert not suffixes & {".pkl", ".pickle", ".pt", ".pth", ".joblib"}


def test_other_settings_have_folders_of_their_own(tmp_path: Path) -> None:
    from advbayes.experiments.playground.worlds import fingerprint
    from advbayes.runs.config import make_config

    first, same, longer = (fingerprint(make_config({"epochs": epochs})) for epochs in (1, 1, 2))
    assert first == same != longer
    with pytest.raises(ValueError, match="name must be one of 'digits', 'wine', got 'beer'"):
        load_world("beer", tmp_path)


def test_the_embedded_wines_are_used_where_the_file_is_absent(worlds: dict[str, World]) -> None:
    wine = worlds["wine"]
    assert wine.task == "classification"
    assert wine.data.dataset.class_names == ("first", "second", "third")
    assert wine.data.x_train.shape[1] == 13
    x, _ = example(wine)
    assert torch.allclose(wine.seen(wine.raw(x)), x, atol=1e-5)


@pytest.mark.parametrize("attack", playground.ATTACKS)
@pytest.mark.parametrize("name", playground.WORLDS)
def test_a_move_answers_at_a_feasible_input(
    worlds: dict[str, World], name: str, attack: str
) -> None:
    world = worlds[name]
    x, y = example(world)
    panels = move(world, x, y, attack=attack, eps=0.4)
    assert [panel.defense for panel in panels] == list(playground.DEFENSES)
    for panel in panels:
        assert bool(world.ball(0.4).contains(panel.x_adv[None], x[None]))
        assert panel.norm == pytest.approx(float((panel.x_adv - x).norm()), abs=1e-6)
        predict = world.predictors[panel.defense]
        for answer, point in ((panel.clean, x), (panel.attacked, panel.x_adv)):
            wanted = predict(point[None]).probs[0]  # type: ignore[attr-defined]
            assert torch.allclose(answer.values, wanted, atol=1e-5)
        assert panel.broken == (panel.clean.label != panel.attacked.label)


def test_eps_zero_changes_nothing_and_moves_repeat(worlds: dict[str, World]) -> None:
    world = worlds["digits"]
    x, y = example(world)
    for panel in move(world, x, y, eps=0.0):
        assert torch.equal(panel.x_adv, x)
        assert torch.equal(panel.clean.values, panel.attacked.values)
    first, second = (move(world, x, None, eps=0.5) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.x_adv, b.x_adv)


def test_each_defense_is_attacked_by_itself(worlds: dict[str, World]) -> None:
    world = worlds["digits"]
    x, y = example(world)
    panels = move(world, x, y, attack="pgd1", eps=0.5)
    for panel in panels:
        (alone,) = move(world, x, y, attack="pgd1", eps=0.5, defenses=[panel.defense])
        assert torch.equal(panel.x_adv, alone.x_adv)
    assert len({tuple(panel.x_adv.flatten().tolist()) for panel in panels}) == len(panels)


def test_an_input_made_for_one_defense_is_shown_to_all(worlds: dict[str, World]) -> None:
    world = worlds["digits"]
    x, y = example(world)
    shared = move(world, x, y, eps=0.5, made_for="MIX")
    (own,) = move(world, x, y, eps=0.5, defenses=["MIX"])
    assert all(torch.equal(panel.x_adv, own.x_adv) for panel in shared)
    with pytest.raises(ValueError, match="defense must be"):
        move(world, x, y, defenses=["hope"])


def test_evidence_and_sample_size_are_the_purifiers_own(worlds: dict[str, World]) -> None:
    world = worlds["digits"]
    x, y = example(world)
    *others, purified = move(world, x, y, eps=0.5)
    assert all(panel.evidence is None and panel.ess is None for panel in others)
    found = world.predictors["purified"].diagnose(torch.stack([x, purified.x_adv]))  # type: ignore[attr-defined]
    assert purified.evidence == pytest.approx(found.log_evidence.tolist())
    assert purified.ess == pytest.approx(found.ess_reference.tolist())


def test_a_number_has_a_density_in_its_own_unit(red: World) -> None:
    x, y = example(red)
    assert red.task == "regression"
    for panel in move(red, x, y, eps=0.5):
        answer = panel.attacked
        assert answer.places is not None
        assert not panel.broken
        assert float(torch.trapezoid(answer.values, answer.places)) == pytest.approx(1, abs=0.02)
        mean = float(torch.trapezoid(answer.values * answer.places, answer.places))
        assert mean == pytest.approx(answer.mean, abs=0.05 * answer.sd)
        assert 20 < answer.sd < 200  # of the target's own unit: 25 to 346
        assert drawn(pictures.density(panel.clean, panel.attacked, 150.0)) is not None


def test_pictures_show_what_they_say() -> None:
    clean, attacked = Answer(torch.tensor([0.75, 0.25])), Answer(torch.tensor([0.0, 1.0]))
    shown = rectangles(pictures.bars(["<b>", "no"], clean, attacked, 1))
    assert [float(each["width"]) for each in shown] == [127.5, 0.0, 42.5, 170.0]
    assert [each["fill"] for each in shown] == [pictures.CLEAN, pictures.ATTACKED] * 2
    added, taken = rectangles(pictures.difference(torch.tensor([[[0.5, -0.25]]]), 0.5))
    assert (added["fill"], taken["fill"]) == (f"{pictures.ATTACKED}ff", f"{pictures.CLEAN}80")
    ink, paper = rectangles(pictures.image(torch.tensor([[[1.0, 0.0]]])))
    assert (ink["y"], paper["y"]) == ("0", "0")  # one row, two columns
    assert int(ink["x"]) < int(paper["x"])
    assert (ink["fill"], paper["fill"]) == ("rgb(0,0,0)", "rgb(255,255,255)")
    up, down = rectangles(pictures.shifts(["a", "b"], torch.tensor([1.0, -0.5]), 1.0))
    assert (float(up["x"]), float(up["width"])) == (180, 55)
    assert (float(down["x"]), float(down["width"])) == (152.5, 27.5)


@pytest.fixture
def app(worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page over these worlds, with every way out of this machine closed."""
    pytest.importorskip("streamlit")
    from streamlit.testing.v1 import AppTest

    real = socket.socket.connect

    def loopback_only(self: socket.socket, address: Any) -> None:
        assert isinstance(address, str) or address[0] in ("127.0.0.1", "::1"), address
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", loopback_only)
    monkeypatch.setattr(playground, "load_world", lambda name: worlds[name])
    return AppTest.from_file(str(PAGE), default_timeout=60).run()


def test_the_page_follows_the_controls(app: Any) -> None:
    def said() -> list[str]:
        assert not app.exception
        return [each.value for each in app.markdown[1:]] + [each.value for each in app.caption]

    first = said()
    assert [text.split("**")[1] for text in first[:4]] == list(playground.DEFENSES)
    assert "effective sample size" in first[-2]
    assert first[-1] == "Runs on this machine alone and sends nothing."
    app.slider(key="eps-digits").set_value(0.0).run()
    assert [text for text in said() if text.startswith("moved by")][:3] == ["moved by 0.00"] * 3
    app.multiselect[0].set_value(["MIX"]).run()
    assert len([text for text in said() if text.startswith("moved by")]) == 1
    app.multiselect[0].set_value([]).run()  # nothing chosen: everything shown
    app.selectbox[1].set_value("undefended").run()
    app.toggle[0].set_value(True).run()
    assert len([text for text in said() if text.startswith("moved by")]) == 4
    app.radio[0].set_value("wine").run()
    assert "The truth is" in app.markdown[0].value
    assert "behind the arrows" in said()[4]  # on a phone the controls are out of sight
    (chosen,) = (each for each in app.slider if each.label == "Test wine")
    chosen.set_value(int(chosen.max)).run()  # the last one
    assert "The truth is" in app.markdown[0].value
    app.slider(key=f"alcohol-{int(chosen.max)}").set_value(14.0).run()
    assert not app.exception
    assert "The truth is" not in app.markdown[0].value  # of a wine that was moved nobody knows it


def test_numbers_are_named(
    app: Any, red: World, worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    import streamlit

    monkeypatch.setitem(worlds, "wine", red)
    streamlit.cache_resource.clear()  # the page keeps what it has loaded
    app.radio[0].set_value("wine").run()
    assert not app.exception
    (name,) = red.data.dataset.target_names
    assert [f"\n\n{name} " in each.value for each in app.markdown[1:5]] == [True] * 4
    streamlit.cache_resource.clear()


def test_a_move_is_a_dozen_gradients_a_defense(
    worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps it below 300 ms (`benchmarks/playground.py` measures the time itself)."""
    from advbayes.attacks import search

    asked, real = [], search.loss_and_gradient

    def counted(*given: Any, **options: Any) -> Any:
        asked.append(1)
        return real(*given, **options)

    monkeypatch.setattr(search, "loss_and_gradient", counted)
    move(worlds["digits"], *example(worlds["digits"]), attack="pgd", eps=0.5)
    assert 4 <= len(asked) <= 4 * 12


def test_what_the_pad_sends_is_checked() -> None:
    from advbayes.experiments.playground.page import pixels

    like = torch.zeros(1, 8, 8)
    assert pixels([0.0] * 64, like) is None  # as it was
    for bad in (None, [1.0] * 63, ["x"] * 64, [float("nan")] * 64, 3):
        assert pixels(bad, like) is None
    changed = pixels([2.0] + [-1.0] * 63, like)
    assert changed is not None
    assert changed.sum() == 1


def test_the_server_is_for_this_machine_alone() -> None:
    line = command(9000, browser=False)
    for setting in (
        "--server.address=127.0.0.1",
        "--server.port=9000",
        "--server.headless=true",
        "--browser.gatherUsageStats=false",
    ):
        assert setting in line
    assert "--server.headless=false" in command(9000, browser=True)


def test_without_streamlit_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("advbayes.cli.experiments.find_spec", lambda name: None)
    assert main(["playground"]) == 2
    assert "pip install 'advbayes[playground]'" in capsys.readouterr().err
