"""`advbayes demo`, `reproduce`, `compare`, `playground`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from advbayes.checks import InputError, choice
from advbayes.cli import flags
from advbayes.cli.screen import emit, resumable, say, warn
from advbayes.cli.signals import watched

Seeds = typer.Option("--seeds", metavar="N or A,B,...", help="How many, or which")
Out = Annotated[Path, typer.Option("--out", help="Folder of the results")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Units side by side, one thread each")]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="slurm|local",
        help="Units as jobs of a scheduler, --jobs of them at a time (local: processes here)",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of `advbayes train` for all rows, such as drop=id; repeat",
    ),
]
NumTest = Annotated[
    int | None, typer.Option(*flags.NUM, min=1, help="How many test examples, from the first")
]
RESULTS = Path("results")
HINT = "; the same command goes on with the units that are missing"  # of a signal
PAGE = Path(__file__).parents[1] / "experiments" / "playground" / "page.py"


def demo(
    out: Annotated[
        str, typer.Option("--out", metavar="FOLDER", help="Where the report goes")
    ] = "demo-report",
    seed: flags.Seed = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A few seconds: tiny trainings, to see that all is installed"),
    ] = False,
    json: flags.Json = False,
) -> None:
    """Train an undefended, an adversarially trained and a MIX model on digits, purify, attack,
    audit, report: two minutes.

    Examples:

    advbayes demo

    advbayes demo --out ./somewhere --seed 1
    """
    from advbayes.experiments.demo import run_demo

    with watched():
        result = run_demo(out, seed=seed, quick=quick, quiet=json)
    if json:
        emit(result)
    else:
        print(result["report"])


def reproduce(
    name: Annotated[
        str, typer.Argument(help="An experiment, `tables` (all tables anew from records) or `list`")
    ],
    preset: Annotated[
        str, typer.Option("--preset", metavar="quick|paper", help="quick is a sketch, in seconds")
    ] = "paper",
    seeds: Annotated[str | None, Seeds] = None,
    row: Annotated[
        list[str] | None, typer.Option("--row", help="Only this row; repeat for more")
    ] = None,
    jobs: Jobs = 1,
    cluster: Cluster = None,
    out: Out = RESULTS,
    changes: Changes = None,
    num_test: NumTest = None,
    again: Annotated[
        bool, typer.Option("--again", help="Replace what is there of these rows and seeds")
    ] = False,
    quiet: flags.Quiet = False,
) -> int:
    """Make a table or figure of the paper: train, attack, record, compare with what was reported.

    Finished parts are not repeated; a run that was stopped is resumed. Records and manifest are
    in OUT/NAME, up to date every minute: `reproduce tables` shows what is done so far. A unit that
    fails is tried once more, then named with its log when the others are done.

    Examples:

    advbayes reproduce wine --preset quick

    advbayes reproduce mnist --row MIX --row AT --seeds 3 --jobs 2
    """
    from advbayes.experiments.catalogue import EXPERIMENTS, Spec
    from advbayes.experiments.running import run
    from advbayes.experiments.views import write_views

    if name == "list":
        for key, experiment in EXPERIMENTS.items():
            say(f"{key:22} {len(experiment.rows):3} rows  {experiment.title}")
        return 0
    if name == "tables":
        for manifest in sorted(out.glob("*/manifest.json")):
            say(str(write_views(manifest.parent)))
        return 0
    spec = Spec(name, preset, _settings(changes), num_test)
    how: dict[str, Any] = {"jobs": jobs, "cluster": cluster, "again": again, "quiet": quiet}
    with resumable(HINT):
        table = write_views(run(spec, out, seeds=_seeds(seeds), rows=row, **how))
    say(str(table))
    return 0


def compare(
    data: Annotated[
        str, typer.Option("--data", help="A built-in data set, or a .csv or .npz file")
    ],
    defense: Annotated[
        list[str],
        typer.Option("--defense", help="none, at, mix, pgd, ... or a row of `reproduce`; repeat"),
    ],
    seeds: Annotated[str, Seeds] = "5",
    target: Annotated[
        str | None, typer.Option("--target", help="Target column of a .csv file")
    ] = None,
    eps: Annotated[
        float, typer.Option("--eps", min=0.0, help="Budget of training and attack, L2")
    ] = 0.3,
    jobs: Jobs = 1,
    cluster: Cluster = None,
    out: Out = RESULTS,
    changes: Changes = None,
    num_test: NumTest = None,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> int:
    """Compare defenses on any data over several seeds: mean, spread, paired tests (Holm), trivial
    predictors.

    Bold is what is significantly better than every other row, with at least five seeds.

    Example:

    advbayes compare --seeds 5 --defense mix --defense at --data patients.csv --target outcome
    """
    from advbayes.experiments.catalogue import Spec
    from advbayes.experiments.defenses import DEFENSES
    from advbayes.experiments.running import run
    from advbayes.experiments.views import write_views
    from advbayes.runs import prepare
    from advbayes.runs.config import make_config
    from advbayes.runs.remarks import remarks

    place = str(Path(data).resolve()) if Path(data).suffix in (".csv", ".npz") else data
    given = {"data": place} | ({} if target is None else {"target": target})
    settings = {"eps": eps, **_settings(changes, OF_COMPARISONS, **given), **given}
    known = tuple(map(str.lower, DEFENSES))
    rows = tuple(choice("defense", name.lower(), known) for name in defense)
    chosen, hidden = _seeds(seeds), quiet or as_json
    config = make_config(settings)
    dataset = prepare(config).dataset
    for remark in remarks(dataset) if config.file is not None else ():
        warn(remark)
    spec = Spec(f"compare-{Path(data).stem}", "paper", settings, num_test, rows, dataset.task, eps)
    with resumable(HINT):
        table = write_views(run(spec, out, seeds=chosen, jobs=jobs, cluster=cluster, quiet=hidden))
    if as_json:
        emit({"table": str(table), "records": str(table.with_name("records.jsonl.gz"))})
    else:
        say(table.read_text())
        say(str(table))
    return 0


def _seeds(text: str | None) -> list[int] | None:
    """`5` is the first five, `3,4` are those two.

    >>> _seeds("2"), _seeds("3,4,3")
    ([0, 1], [3, 4])
    """
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = "seeds must be a number, or numbers with commas between them"
        raise InputError(f"{wanted}, got {text!r}") from None
    chosen = numbers if "," in text else list(range(numbers[0]))
    if not chosen or min(chosen) < 0:
        wanted = "seeds must be how many (1 or more), or numbers >= 0 with commas between them"
        raise InputError(f"{wanted}, got {text!r}")
    return list(dict.fromkeys(chosen))


OF_ROWS = {"defense": "the rows, which are told apart by it", "seed": "--seeds"}
OF_COMPARISONS = OF_ROWS | {"data": "--data", "target": "--target", "eps": "--eps"}


def _settings(
    changes: list[str] | None, elsewhere: Mapping[str, str] = OF_ROWS, **of_data: Any
) -> dict[str, Any]:
    """The keys that `--set` gives, without those that are said elsewhere."""
    from advbayes.cli.train import parse
    from advbayes.runs.config import NETWORKS, RunConfig, make_config

    values = {}
    for change in changes or []:
        key, sign, text = change.partition("=")
        if not sign:
            raise InputError(f"--set must be KEY=VALUE, got {change!r}")
        if key in elsewhere:
            raise InputError(f"--set must leave {key} to {elsewhere[key]}, got {change!r}")
        values[key] = parse(key, text) if key in RunConfig.model_fields else text
    config = make_config({**of_data, **values})
    if config.channel or not (config.network in NETWORKS or config.network.startswith("advbayes.")):
        raise InputError(
            "--set must name no code of your own (channel, network), which only `advbayes train "
            f"--trust-network` runs, got {', '.join(changes or [])}"
        )
    return values


def playground(
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Of 127.0.0.1")] = 8501,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser")
    ] = True,
) -> None:
    """Attack small models by hand: a page on this machine alone, which sends nothing.

    Choose or draw a digit, or move the features of a wine; choose attack, eps and defenses; see the
    input, the perturbation and what each defense predicts. The first start trains the models (about
    a minute) and keeps them in the cache.

    Examples:

    advbayes playground

    advbayes playground --port 9000 --no-browser
    """
    if find_spec("streamlit") is None:
        needed = "the playground needs streamlit"
        raise ModuleNotFoundError(f"{needed}: pip install 'advbayes[playground]'")
    from advbayes.experiments.playground import WORLDS, load_world

    with watched():
        for name in WORLDS:
            load_world(name, tell=say)
        say(f"http://127.0.0.1:{port} (Ctrl-C ends it)")
        server = subprocess.Popen(command(port, browser=browser), env=environment())
        try:
            server.wait()
        finally:
            server.terminate()
            server.wait()
    if server.returncode:
        raise OSError(f"the playground's server ended with code {server.returncode}")


def command(port: int, *, browser: bool) -> list[str]:
    """The server: this machine alone, no statistics, no watching of files.

    >>> "--server.address=127.0.0.1" in command(8501, browser=False)
    True
    """
    settings = {
        "server.address": "127.0.0.1",
        "server.port": str(port),
        "server.headless": str(not browser).lower(),
        "server.fileWatcherType": "none",
        # would collect all of torch's objects before the pictures are sent: longer than the move
        "runner.postScriptGC": "false",
        "browser.gatherUsageStats": "false",
        "browser.serverAddress": "127.0.0.1",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.level": "error",
        "theme.primaryColor": "#0072b2",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "streamlit", "run", str(PAGE), *options]


def environment() -> dict[str, str]:
    """Without this process's settings of streamlit, and with one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLIT_")}
    return kept | {"OMP_NUM_THREADS": "1"}
