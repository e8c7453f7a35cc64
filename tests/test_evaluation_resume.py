"""`evaluate(out=)` goes on with the same evaluation, and with no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes import L2, Evaluation, evaluate, load_evaluation, pgd
from advbayes.attacks import DivergenceFrom, MarginTo, Suite, Toward, Transfer
from advbayes.evaluation.contents import contents_of
from advbayes.store import StoreError, documents, read_document, write_document


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHT = torch.randn(3, 8, generator=generator(0))
X = torch.randn(1200, 8, generator=generator(1))
Y = (X @ WEIGHT.T).argmax(1)
ONES = torch.ones(8)
LEFT = torch.arange(8) < 4
MIDDLE = torch.arange(1200) == 600  # a repr shows the first and the last entries
SURE = torch.nn.functional.one_hot((Y + 1) % 3, 3) * 0.98 + 0.02 / 3

OTHER = torch.where(MIDDLE[:, None], SURE.roll(1, 1), SURE)


def predict(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T)


def source(sign: float) -> Any:
    return lambda x: Categorical(logits=sign * (x @ WEIGHT.T))


def noisy(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T + 0.1 * torch.randn(len(x), 3))


PAIRS = {
    "scale": (pgd(L2(0.5, scale=ONES), 5), pgd(L2(0.5, scale=3 * ONES), 5), "ball.scale"),
    "mask": (pgd(L2(0.5, mask=LEFT), 5), pgd(L2(0.5, mask=~LEFT), 5), "ball.mask"),
    "box": (
        pgd(L2(0.5, box=(-9 * ONES, 9 * ONES)), 5),
        pgd(L2(0.5, box=(-9 * ONES, 8 * ONES)), 5),
        "ball.box.1",
    ),
    "source": (
        Transfer(pgd(L2(0.5), 5), (source(1.0),)),
        Transfer(pgd(L2(0.5), 5), (source(-1.0),)),
        "sources.0",
    ),
    "stage": (
        pgd(L2(0.5), 5, DivergenceFrom(SURE)),
        pgd(L2(0.5), 5, DivergenceFrom(OTHER)),
        "stages.0.0.target",
    ),
    "nested": (
        Suite((pgd(L2(0.5), 5, Toward(MarginTo(Y))),)),
        Suite((pgd(L2(0.5), 5, Toward(MarginTo(torch.where(MIDDLE, (Y + 1) % 3, Y)))),)),
        "attacks.0.stages.0.0.loss.classes",
    ),
}


FIRST = {name: first for name, (first, _, _) in PAIRS.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return evaluate(predict, (X, Y), attacks=FIRST, out=tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("name", PAIRS)
def test_an_attack_that_holds_other_tensors_or_predictors_is_another_evaluation(
    name: str, saved: Evaluation
) -> None:
    _, second, path = PAIRS[name]
    with pytest.raises(ValueError, match=rf"whose contents\['{name}'\]\['{path}'\] is"):
        evaluate(predict, (X, Y), attacks=FIRST | {name: second}, out=saved.folder)


def test_attacks_that_hold_the_same_are_gone_on_with(saved: Evaluation) -> None:
    again = evaluate(predict, (X, Y), attacks=FIRST, out=saved.folder)
    for name in PAIRS:
        assert torch.equal(
            again.columns(attack=name)["log_prob"], saved.columns(attack=name)["log_prob"]
        )


def test_the_log_is_not_read_again_for_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20 blocks of each of four cells as often as with one."""
    scan, read = documents._scan, list[Path]()
    monkeypatch.setattr(documents, "_scan", lambda path: (read.append(path), scan(path))[1])
    times = []
    for size in (60, 3):
        evaluate(
            predict,
            (X[:60], Y[:60]),
            attacks={"p": FIRST["mask"]},
            batch_size=size,
            out=tmp_path / str(size),
        )
        times.append(len(read))
    assert times[1] == 2 * times[0]


def test_equal_contents_are_equal_whatever_object_holds_them() -> None:
    one, other = (
        pgd(L2(0.5, scale=ONES.clone()), 5, DivergenceFrom(SURE.clone())) for _ in range(2)
    )
    assert contents_of(one, lambda _: []) == contents_of(other, lambda _: [])
    assert contents_of(pgd(L2(0.5), 5), lambda _: []) == {}


def test_a_fingerprint_does_not_touch_a_sources_own_generator() -> None:
    from advbayes import BayesianModel, FreshPredictive, MeanField
    from advbayes import Categorical as Classes

    model = BayesianModel(torch.nn.Linear(8, 3), Classes())
    fresh = FreshPredictive(model, MeanField(model, init_scale=0.5), 3, generator(7))
    quiet = dataclasses.replace(pgd(L2(0.0), 1))
    before = generator(7).get_state()
    evaluate(predict, (X, Y), attacks={"p": _Holding(quiet, fresh)})
    assert torch.equal(fresh.generator.get_state(), before)


@dataclasses.dataclass(frozen=True)
class _Holding:
    attack: Any
    reference: Any

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.attack(predict, x, y, generator=generator)  # type: ignore[no-any-return]


def _without_contents(folder: Path) -> None:
    file = folder / "config.json"
    config: Any = read_document(file)
    del config["contents"]
    write_document(file, config)


def test_a_folder_without_contents_is_gone_on_with_only_where_none_are_needed(
    tmp_path: Path,
) -> None:
    plain, scaled = {"p": pgd(L2(0.5), 5)}, {"p": pgd(L2(0.5, scale=ONES), 5)}
    before = evaluate(predict, (X[:60], Y[:60]), attacks=plain, out=tmp_path / "plain")
    _without_contents(tmp_path / "plain")
    assert (
        evaluate(predict, (X[:60], Y[:60]), attacks=plain, out=tmp_path / "plain")
        .columns()["log_prob"]
        .tolist()
        == before.columns()["log_prob"].tolist()
    )
    evaluate(predict, (X[:60], Y[:60]), attacks=scaled, out=tmp_path / "scaled")
    _without_contents(tmp_path / "scaled")
    with pytest.raises(ValueError, match=r"does not say what the attacks held \(p: ball.scale\)"):
        evaluate(predict, (X[:60], Y[:60]), attacks=scaled, out=tmp_path / "scaled")
    # reading is another matter
    assert load_evaluation(tmp_path / "scaled").estimate("accuracy").value <= 1.0


def test_a_predictor_that_draws_from_the_global_stream_can_be_gone_on_with(tmp_path: Path) -> None:
    attacks = {"p": pgd(L2(0.3), 5)}
    torch.manual_seed(1)
    first = evaluate(
        {"noisy": noisy, "plain": predict},
        (X[:60], Y[:60]),
        attacks=attacks,
        batch_size=32,
        out=tmp_path / "run",
    )
    log = tmp_path / "run" / "records.jsonl"
    whole = log.read_bytes()
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:100]))  # interrupted
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = evaluate(
        {"noisy": noisy, "plain": predict},
        (X[:60], Y[:60]),
        attacks=attacks,
        batch_size=32,
        out=tmp_path / "run",
    )
    assert torch.equal(torch.get_rng_state(), state)  # the caller's stream is left alone
    assert log.read_bytes() == whole
    assert torch.equal(second.columns()["log_prob"], first.columns()["log_prob"])
    with pytest.raises(ValueError, match=r"whose predictors\['plain'\] is \[.*, not \["):
        evaluate(
            {"plain": source(0.5), "noisy": noisy},
            (X[:60], Y[:60]),
            attacks=attacks,
            batch_size=32,
            out=tmp_path / "run",
        )


def test_an_evaluation_that_was_cut_is_no_evaluation(tmp_path: Path) -> None:
    """Its worst case would be one over fewer attacks or examples."""
    attacks = {"p": pgd(L2(0.3), 2), "q": pgd(L2(0.3), 3)}
    whole = evaluate(predict, (X[:8], Y[:8]), attacks=attacks, batch_size=4, out=tmp_path)
    log = tmp_path / "records.jsonl"
    data = log.read_bytes()
    lines = data.splitlines(keepends=True)
    for num in (0, 8, 12, 24, len(lines) - 1):
        log.write_bytes(b"".join(lines[:num]))
        with pytest.raises(StoreError, match="evaluate into this folder once more"):
            load_evaluation(tmp_path)
    again = evaluate(predict, (X[:8], Y[:8]), attacks=attacks, batch_size=4, out=tmp_path)
    assert log.read_bytes() == data
    assert load_evaluation(tmp_path).table().json() == again.table().json() == whole.table().json()


@pytest.mark.parametrize("key", ["task", "num", "trivial"])
def test_a_configuration_that_lacks_something_is_refused(tmp_path: Path, key: str) -> None:
    evaluate(predict, (X[:8], Y[:8]), attacks={"p": pgd(L2(0.3), 2)}, out=tmp_path)
    config: Any = read_document(tmp_path / "config.json")
    for changed in ({k: v for k, v in config.items() if k != key}, {**config, key: 3.5}):
        write_document(tmp_path / "config.json", changed)
        if key != "task" or key not in changed:
            with pytest.raises(StoreError, match="wanted"):
                load_evaluation(tmp_path)
