"""What an evaluation keeps: its arrays are hashed, what functions close over is compared, and
resuming draws the same."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

from advbayes import (
    L2,
    BayesianModel,
    FreshPredictive,
    MeanField,
    evaluate,
    from_function,
    load_evaluation,
    pgd,
    rescore,
)
from advbayes import Categorical as Classes
from advbayes.attacks import PGD, Transfer, nll, one_step
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.evaluation import UnchangedWarning
from advbayes.seeds import generator_for
from advbayes.store import StoreError

WEIGHT = torch.randn(3, 6, generator=generator_for(0, "weight"))
X = torch.randn(50, 6, generator=generator_for(0, "x"))
Y = (X @ WEIGHT.T).argmax(1)
ATTACKS = {"PGD": pgd(L2(0.5), 5)}


def predict(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T)


def run(folder: Path, attacks: Any = None, **options: Any) -> Any:
    return evaluate(
        predict, (X, Y), attacks=attacks or ATTACKS, batch_size=20, out=folder, **options
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    run(folder)
    return folder


def _delete(file: Path) -> None:
    file.unlink()


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1  # the last bits of a number: still a valid file
    file.write_bytes(bytes(data))


def _swap(file: Path) -> None:
    shutil.copy(file.with_name("00000.safetensors"), file)


@pytest.mark.parametrize("damage", [_delete, _truncate, _flip, _swap])
@pytest.mark.parametrize("number", [1, 4])
def test_a_damaged_array_is_refused_when_read_and_made_again_when_resumed(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], number: int
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = contents(folder)
    damage(folder / "blocks" / f"{number:05d}.safetensors")
    for reading in (load_evaluation, lambda place: rescore(place, predict)):
        with pytest.raises(
            StoreError, match=rf"{number:05d}.safetensors: wanted the array that was scored, got"
        ):
            reading(folder)
    run(folder)
    assert contents(folder) == before
    rescore(folder, predict)


def test_an_array_that_comes_out_otherwise_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "blocks" / "00004.safetensors").unlink()
    plain = PGD.__call__
    monkeypatch.setattr(
        PGD, "__call__", lambda self, *args, **kwargs: plain(self, *args, **kwargs) * (1 - 1e-6)
    )
    with pytest.raises(
        StoreError, match="wanted the array that was scored, to the bit, when made again"
    ):
        run(folder)


# --- what functions hold ------------------------------------------------------------------------

POWER = 1.0


def _closure(power: float) -> Any:
    return lambda prediction, y: nll(prediction, y) ** power


def _default(power: float) -> Any:
    return lambda prediction, y, power=power: nll(prediction, y) ** power


def _keyword(power: float) -> Any:
    def loss(prediction: Distribution, y: Tensor, *, power: float = power) -> Tensor:
        return nll(prediction, y) ** power

    return loss


def _three(power: float, prediction: Distribution, y: Tensor) -> Tensor:
    return nll(prediction, y) ** power


def _partial(power: float) -> Any:
    return functools.partial(_three, power)


class _Object:
    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        return nll(prediction, y) ** self.power

    def method(self, prediction: Distribution, y: Tensor) -> Tensor:
        return self(prediction, y)


def _tensor(power: float) -> Any:
    held = torch.tensor(power)
    return lambda prediction, y: nll(prediction, y) ** held


def _nested(power: float) -> Any:
    inner = _closure(power)
    return lambda prediction, y: inner(prediction, y)


def _global(power: float) -> Any:
    def loss(prediction: Distribution, y: Tensor) -> Tensor:
        return nll(prediction, y) ** POWER

    globals()["POWER"] = power
    return loss


def _code(power: float) -> Any:
    if power == 1:
        return lambda prediction, y: nll(prediction, y)
    return lambda prediction, y: nll(prediction, y) ** 2


HOLDERS: dict[str, Callable[[float], Any]] = {
    "closure": _closure,
    "default": _default,
    "keyword": _keyword,
    "partial": _partial,
    "object": _Object,
    "method": lambda power: _Object(power).method,
    "tensor": _tensor,
    "nested": _nested,
    "global": _global,
    "code": _code,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_function_that_holds_another_value_is_another_attack(name: str, tmp_path: Path) -> None:
    first = run(tmp_path, {"p": pgd(L2(0.5), 3, HOLDERS[name](1.0))})
    again = run(tmp_path, {"p": pgd(L2(0.5), 3, HOLDERS[name](1.0))})
    assert torch.equal(first.columns()["log_prob"], again.columns()["log_prob"])
    with pytest.raises(
        ValueError, match=r"or hold the same evaluation, got .* (contents|attacks)\['p'\]"
    ):
        run(tmp_path, {"p": pgd(L2(0.5), 3, HOLDERS[name](2.0))})


def test_an_attack_that_is_a_function_is_known_by_what_it_holds(tmp_path: Path) -> None:
    def made(eps: float) -> Any:
        def attack(
            predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
        ) -> Tensor:
            return x + eps

        return attack

    run(tmp_path, {"p": made(0.1)})
    run(tmp_path, {"p": made(0.1)})
    with pytest.raises(ValueError, match=r"contents\['p'\]\['closure.eps'\] is '0.1', not '0.2'"):
        run(tmp_path, {"p": made(0.2)})


def test_what_cannot_be_compared_is_not_resumed(tmp_path: Path) -> None:
    stream = torch.Generator().manual_seed(0)

    def loss(prediction: Distribution, y: Tensor) -> Tensor:
        return nll(prediction, y) * torch.rand(len(y), generator=stream)

    run(tmp_path, {"p": pgd(L2(0.5), 3, loss)})
    with pytest.raises(
        ValueError, match=r"out must be a new folder: the attack 'p' holds torch.*Generator"
    ):
        run(tmp_path, {"p": pgd(L2(0.5), 3, loss)})


# --- randomness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["global stream", "generator of its own"])
def test_a_transfer_from_stochastic_sources_resumes_to_the_bit(own: bool, tmp_path: Path) -> None:
    model = BayesianModel(nn.Linear(6, 3), Classes())
    posterior = MeanField(model, init_scale=0.5)

    def attacks() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5) if own else None
        return {"t": Transfer(pgd(L2(0.5), 3), (FreshPredictive(model, posterior, 3, generator),))}

    run(tmp_path / "whole", attacks())
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    log = tmp_path / "cut" / "records.jsonl"
    # killed in the attack's second block
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:75]))
    (tmp_path / "cut" / "blocks" / "00004.safetensors").unlink()
    run(tmp_path / "cut", attacks())
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


# --- warnings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """An attack that does nothing, as one in the wrong units may."""

    ball: L2

    def __call__(
        self,
        predict: Any,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return x.clone()


def test_an_attack_that_changes_nothing_is_told() -> None:
    with pytest.warns(UnchangedWarning, match="attack 'idle' changed no input of 'predict'"):
        evaluate(predict, (X, Y), attacks={"idle": Idle(L2(0.5)), **ATTACKS})
    evaluate(predict, (X, Y), attacks={"none": Idle(L2(0.0))})  # with eps = 0 that is right
    # and where all is wrong already
    evaluate(predict, (X, (Y + 1) % 3), attacks={"idle": Idle(L2(0.5))})


@pytest.mark.parametrize("right", [1, 30, len(Y)])
def test_one_right_answer_is_enough_to_be_told(right: int) -> None:
    y = torch.where(torch.arange(len(Y)) < right, Y, (Y + 1) % 3)
    with pytest.warns(UnchangedWarning, match="attack 'idle' changed no input"):
        evaluate(predict, (X, y), attacks={"idle": Idle(L2(0.5))})


def test_a_predictor_without_gradients_is_told_of_once() -> None:
    blind = from_function(lambda x: x @ WEIGHT.numpy().T, "logits", numpy=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        evaluate(
            blind, (X, Y), attacks={"PGD": pgd(L2(0.5), 5), "one": one_step(L2(0.5))}, batch_size=20
        )
    assert [warning.category for warning in told].count(NoGradientWarning) == 1
