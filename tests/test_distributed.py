"""Several ranks give the answers of one process: training, evaluation, audit, purifier; a rank that
is lost ends the others, and the run goes on exactly."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from advbayes import L2, AttackChannel, MeanField, Noise, Purifier, distributed, fit, nll, one_step
from advbayes.cli import main
from advbayes.distributed import Ranks
from advbayes.seeds import Share, drawn, for_thetas, generator_for
from tests import forking, killing, ranks


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process finds."""
    folder = tmp_path_factory.mktemp("one")
    save_file(flat(ranks.everything(folder)), folder / "found")
    return folder


def launched(size: int, work: Callable[[Ranks], object], log: Path) -> None:
    """`work(ranks)` on all ranks, none of which may fail."""

    def joined() -> None:
        with distributed.joined() as group:
            work(group)

    codes = ranks.wait(ranks.start(size, joined, log))
    assert codes == [0] * size, log.read_text()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_answers_of_one_process(size: int, one: Path, tmp_path: Path) -> None:
    several = tmp_path

    def work(group: Ranks) -> None:
        assert group.size == size
        found = flat(ranks.everything(several))
        for name, value in found.items():
            assert torch.equal(group.same(value), value), name
        said = ranks.verdict() if size == 2 else {}
        assert list(group.mapped(lambda k: {"k": torch.tensor(k)}, range(5))) == [
            {"k": torch.tensor(k)} for k in range(5)
        ]
        if group.is_first:
            save_file(found, several / "found")
            (several / "verdict").write_text(json.dumps(said))

    launched(size, work, tmp_path / "log")
    wanted, found = load_file(one / "found"), load_file(several / "found")
    assert wanted.keys() == found.keys()
    own = [name for name in wanted if name.startswith("train own thetas")]
    assert any(not torch.allclose(wanted[name], found[name], rtol=1e-3) for name in own)
    for name in wanted.keys() - set(own):
        if name.startswith("evaluate:"):
            assert torch.equal(wanted[name], found[name]), name
        else:
            close = torch.allclose(found[name], wanted[name], rtol=1e-9, atol=1e-11)
            assert close, (name, found[name], wanted[name])
    if size == 2:
        assert json.loads((several / "verdict").read_text()) == json.loads(
            json.dumps(ranks.verdict())
        )
    files = sorted(path.relative_to(one) for path in (one / "evaluation").rglob("*.*"))
    assert any(path.suffix == ".safetensors" for path in files)
    for path in files:
        assert (one / path).read_bytes() == (several / path).read_bytes(), path


def flat(found: dict[str, ranks.Found]) -> ranks.Found:
    return {
        f"{part}:{name}": value.contiguous()
        for part, values in found.items()
        for name, value in values.items()
    }


def test_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = ranks.numbers(ranks.resumed(None, 6))
    first = ranks.resumed(None, 2).state

    def work(group: Ranks) -> None:
        state = ranks.resumed(first if group.is_first else None, 4).state
        assert state.step == len(state.history["bound"]) == 4
        if group.is_first:
            save_file(state.tensors, tmp_path / "state")

    launched(2, work, tmp_path / "log")
    history = {name: [0.0] * 4 for name in first.history}
    second = type(first)(4, 0, load_file(tmp_path / "state"), history)
    last = ranks.numbers(ranks.resumed(second, 6))
    for name in last.keys() - history.keys():
        torch.testing.assert_close(last[name], whole[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_sharded_reference_in_float32_gives_the_answers_of_the_whole(
    outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in both precisions, ranks whose parts differ in reach, queries beyond any reach: a
    prediction takes two exchanges for each block of queries, its gradient one, whatever a rank
    holds."""
    monkeypatch.setattr("advbayes.purification.store._SMALL", 2000)  # a rank's part alone would be

    def answers(group: Ranks) -> dict[str, torch.Tensor]:
        x = torch.randn(301, 3, generator=generator_for(0, "reference"))
        x[-1] = 10.0
        rows = group.rows(len(x))
        net = ranks.model(outputs).to("cpu", torch.float32)
        thetas = MeanField(net).sample(3, generator=generator_for(1, "thetas"))
        channel = AttackChannel(one_step(L2(0.5), nll), 0.5)
        purified = Purifier(net, channel, thetas, x[rows], sharded=True)
        assert purified.store.num_reference == len(x[rows])  # and nothing of the others
        at = torch.randn(40, 3, generator=generator_for(2, "queries"))
        at[::4] *= 100.0
        at[1] = 1e9
        assert {query.dtype for query in purified.queries(at)} == {torch.float32, torch.float64}
        at.requires_grad_()
        sent: list[torch.Size] = []
        reduced = Ranks._reduced

        def counted(self: Ranks, tensor: torch.Tensor, how: Any) -> torch.Tensor:
            sent.append(tensor.shape)
            return reduced(self, tensor, how)

        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "_reduced", counted)
            predicted = purified(at)
            assert group.size == 1 or len(sent) == 2 * 2  # two precisions, hence two blocks
            value: Any = predicted.mean if outputs == 1 else predicted.logits  # type: ignore[attr-defined]
            sent.clear()
            (gradient,) = torch.autograd.grad(value.reshape(len(at), -1)[:, 0].sum(), at)
            assert group.size == 1 or len(sent) == 2
        told = purified.diagnose(at.detach())
        far = told.out_of_support.double()
        found = {"value": value, "gradient": gradient, "far": far, "near": told.nearest}
        return {name: tensor.detach().contiguous() for name, tensor in found.items()}

    def work(group: Ranks) -> None:
        found = answers(group)
        if group.is_first:
            save_file(found, tmp_path / "found")

    launched(2, work, tmp_path / "log")
    wanted, found = answers(Ranks()), load_file(tmp_path / "found")
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_what_goes_wrong_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    def fail(task: int) -> dict[str, torch.Tensor]:
        if task == 1:
            raise KeyError("task 1")
        return {}

    def work(group: Ranks) -> None:
        with pytest.raises(Exception, match="task 1") as raised:
            list(group.mapped(fail, range(4)))
        assert type(raised.value).__name__ == "KeyError"
        with pytest.raises(
            ValueError, match=r"num_data must be the same on all ranks, got \[3, 4\]"
        ):
            group.agree(num_data=3 + group.rank, steps=1)
        with pytest.raises(ValueError, match="compile must be False on 2 ranks"):
            ranks.trained(Noise(), compile=True)
        x, _ = ranks.data(4)
        one = ranks.model()
        thetas = MeanField(one).sample(1)
        with pytest.raises(ValueError, match="index must be None for a sharded reference"):
            Purifier(one, Noise(0.1), thetas, x, sharded=True, index="faiss")
        loader = DataLoader(TensorDataset(x, x[:, 0]), sampler=DistributedSampler(x))  # type: ignore[arg-type,var-annotated]
        with pytest.raises(ValueError, match="got one with a DistributedSampler"):
            fit(one, MeanField(one), Noise(), loader, steps=1)
        # one rank's wish to stop is everybody's, after the same step: the next one
        steps = iter(range(9))
        wish = lambda: group.rank == 1 and next(steps) == 1  # noqa: E731
        result = ranks.trained(Noise(), stop=wish)
        assert result.interrupted
        assert result.steps == 3

    launched(2, work, tmp_path / "log")


def test_a_silent_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still keeps its connections open: only its silence tells."""
    monkeypatch.setattr(distributed, "BEAT", 0.05)
    monkeypatch.setattr(distributed, "SILENCE", 1.0)
    ready = tmp_path / "ready"

    def work() -> None:
        with distributed.joined() as group:
            group.sum(torch.zeros(1))
            time.sleep(1.5)  # longer than the silence that is allowed, and no exchange: no alarm
            group.sum(torch.zeros(1))
            if group.rank == 1:
                ready.touch()
                time.sleep(60)
            group.sum(torch.zeros(1))

    first, second = ranks.start(2, work, tmp_path / "log")
    while not ready.exists():
        time.sleep(0.01)
    os.kill(second, signal.SIGSTOP)
    try:
        assert ranks.wait([first], limit=20) == [2]
    finally:
        os.kill(second, signal.SIGKILL)
        ranks.wait([second])
    assert "no sign of life from rank 1" in (tmp_path / "log").read_text()


def test_a_rank_that_never_comes_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "BEAT", 0.05)
    monkeypatch.setattr(distributed, "START", 1.0)

    def work() -> None:
        if os.environ["RANK"] == "0":
            with distributed.joined():
                pass

    assert ranks.wait(ranks.start(2, work, tmp_path / "log"), limit=20) == [2, 0]
    assert "no sign of life from rank 1 for 1 seconds" in (tmp_path / "log").read_text()


def test_a_killed_rank_ends_the_run_which_goes_on_exactly(tmp_path: Path) -> None:
    settings = killing.SMALL | {"epochs": "10", "defense": "mix"}
    log, draw = tmp_path / "log", random.Random(0)

    def command(*argv: str) -> list[int]:
        return ranks.start(2, lambda: main(["train", *argv, "--quiet"]), log)

    new = [*killing.flags(settings), "--out"]
    assert ranks.wait(command(*new, str(tmp_path / "whole"))) == [0, 0], log.read_text()
    wanted = killing.state_of(tmp_path / "whole")
    run = tmp_path / "run"
    children = command(*new, str(run))
    while not (run / "checkpoint").exists():
        time.sleep(0.01)
    killed = draw.randrange(2)
    os.kill(children[killed], signal.SIGKILL)
    codes = ranks.wait(children, limit=20)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 2
    assert "another one is gone or out of reach" in log.read_text()
    assert ranks.wait(command("--resume", str(run))) == [0, 0], log.read_text()
    assert killing.state_of(run) == wanted
    assert ranks.wait(command("--resume", str(run))) == [0, 0]  # nothing left to do
    assert main(["train", *new, str(tmp_path / "one"), "--quiet"]) == 0
    last = [
        json.loads((place / "history.jsonl").read_text().splitlines()[-1])["bound"]
        for place in (run, tmp_path / "one")
    ]
    assert last[0] == pytest.approx(last[1], rel=1e-4)


@pytest.mark.unshifted("torchrun starts processes that know nothing of it")
def test_torchrun_trains_what_one_process_trains(tmp_path: Path) -> None:
    """The command as users give it, with ranks that torchrun starts itself."""
    data = tmp_path / "data.csv"  # for which the ranks need not load scikit-learn
    rows = torch.randn(320, 4, generator=generator_for(0, "rows")).tolist()
    data.write_text("a,b,c,y\n" + "\n".join(",".join(f"{v:.4f}" for v in row) for row in rows))
    settings = killing.SMALL | {"data": str(data), "epochs": "1", "defense": "mix"}
    argv = ["train", *killing.flags(settings), "--target", "y", "--quiet", "--out"]
    command = ["--standalone", "--nproc-per-node=2", "-m", "advbayes", *argv, str(tmp_path / "two")]
    done = forking.ran(
        "import warnings\n"
        "warnings.simplefilter('ignore')\n"  # torchrun's own
        "from torch.distributed.run import main\n"
        f"main({command!r})\n"
    )
    assert done.returncode == 0, done.stderr
    assert main([*argv, str(tmp_path / "one")]) == 0
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 8
    for wanted, found in zip(one, two, strict=True):
        assert found["bound"] == pytest.approx(wanted["bound"], rel=1e-4)


def test_the_evaluate_command_writes_the_same_files_on_any_number_of_ranks(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    settings = killing.SMALL | {"epochs": "1"}
    assert main(["train", *killing.flags(settings), "--out", str(run), "--quiet"]) == 0

    def evaluated(name: str) -> int:
        options = ["--attack", "pgd", "--steps", "2", "--eps", "0.5", "--num", "30"]
        options += ["--thetas", "3", "--batch-size", "7", "--purify", "online"]
        return main(["evaluate", str(run), *options, "--name", name, "--json"])

    assert evaluated("one") == 0
    assert ranks.wait(ranks.start(2, lambda: evaluated("two"), log)) == [0, 0], log.read_text()
    one, two = (run / "evaluation" / name for name in ("one", "two"))
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    assert sum(path.suffix == ".safetensors" for path in names) > 1
    for name in names:
        if name.name != "command.json":  # which names the folder
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert log.read_text().count('"threat_model"') == 1  # the first rank alone prints


def test_a_process_group_of_ones_own_serves_as_well(tmp_path: Path) -> None:
    wanted = ranks.numbers(ranks.trained(ranks.mix()))

    def work() -> None:
        torch.distributed.init_process_group("gloo")
        with distributed.joined() as group:  # leaves the group as it is
            assert group == distributed.ranks() == Ranks(int(os.environ["RANK"]), 2)
            with distributed.alone():
                assert distributed.ranks() == Ranks()
        found = ranks.numbers(ranks.trained(ranks.mix()))
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-11)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    assert ranks.wait(ranks.start(2, work, tmp_path / "log")) == [0, 0], (
        tmp_path / "log"
    ).read_text()


def test_other_commands_refuse_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert main(["datasets"]) == 2
    assert "torchrun: must start one of train, evaluate, audit" in capsys.readouterr().err


@pytest.mark.parametrize(("num", "size"), [(10, 3), (2, 5), (1, 1)])
def test_shares_are_all_rows_once_and_weigh_one(num: int, size: int) -> None:
    group = [Ranks(rank, size) for rank in range(size)]
    assert [row for each in group for row in range(num)[each.rows(num)]] == list(range(num))
    assert sum(each.share(num)[1] for each in group) == pytest.approx(1.0)
    assert all(each.share(num)[0].stop > each.share(num)[0].start for each in group)


def test_a_foreign_draw_from_a_share_is_this_ranks_own() -> None:
    """Code that does not know of shares must not draw the same on all ranks."""

    def share(rank: int, **options: Any) -> torch.Generator:
        return Ranks(rank, 2).generator(7, 4, torch.device("cpu"), **options)

    def own(generator: torch.Generator | None) -> torch.Tensor:
        return torch.randn(3, generator=generator)

    first, second = share(0), share(1)
    assert isinstance(first, Share)
    assert not torch.equal(own(first), own(second))
    assert torch.equal(own(for_thetas(share(0))), own(for_thetas(share(1))))
    apart = own(for_thetas(share(0, own_thetas=True))), own(for_thetas(share(1, own_thetas=True)))
    assert not torch.equal(*apart)
    whole = torch.randn(4, 2, generator=torch.Generator().manual_seed(7))
    parts = [drawn(torch.randn, (2, 2), share(rank)) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), whole)
