"""`advbayes attack`: adversarial examples as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advbayes.checks import counted
from advbayes.cli import flags
from advbayes.cli.screen import check_new, emit, say
from advbayes.cli.signals import watched
from advbayes.cli.threat import attack_for, open_run, remark_spent, remark_thetas

_ROWS = 256


def attack(
    run: flags.Run,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="A new .safetensors or .npz file")
    ],
    attack: flags.One = "pgd",
    eps: flags.Eps = None,
    norm: flags.Norm = None,
    feature_eps: flags.FeatureEps = None,
    fixed: flags.Fixed = None,
    steps: flags.Steps = flags.SPENT["steps"],
    restarts: flags.Restarts = flags.SPENT["restarts"],
    queries: flags.Queries = flags.SPENT["queries"],
    num: flags.Num = 100,
    thetas: flags.Thetas = flags.THETAS,
    seed: flags.Seed = 0,
    trust_network: flags.Trust = False,
    json: flags.Json = False,
) -> None:
    """Attack test examples of a run and keep the arrays (x, x_adv, y; in the model's units).

    Examples:

    advbayes attack RUN --attack pgd_plus --eps 1 --out adversarial.safetensors

    advbayes attack RUN --attack strong --eps 0.5 --num 50 --out adversarial.npz
    """
    check_new("out", out, (".safetensors", ".npz"))

    import torch
    from safetensors.torch import save

    from advbayes.cli.describe import column_of, said_units, units_within
    from advbayes.cli.predicting import write_npz
    from advbayes.evaluation import score
    from advbayes.evaluation.measuring import attacked_in_batches
    from advbayes.progress import Progress
    from advbayes.store import write_bytes

    _, trained, data = open_run(run, trusted=trust_network)
    x, y = data.x_test[:num], data.y_test[:num]
    ball = trained.ball(norm, eps, fixed or (), feature_eps or ())
    spent = {"steps": steps, "restarts": restarts, "queries": queries}
    remark_spent([attack], spent)
    remark_thetas(trained, thetas)
    method = attack_for(attack, ball, trained, spent, trusted=trust_network)
    predict = trained.predict(thetas)
    parts = []
    with Progress("attack", len(x)) as bar:
        for part in attacked_in_batches(
            predict, method, x, y, seed=seed, key=f"attack/{attack}", batch_size=_ROWS
        ):
            parts.append(part)
            bar.advance(num=len(part))
    x_adv = torch.cat(parts)
    if trained.task == "regression":
        column = column_of("rmse", trained.scaling, trained.target_names)
        errors = (score(predict, each, y, "regression")["squared_error"] for each in (x, x_adv))
        before, after = (column.factor * float(each.mean().sqrt()) for each in errors)
    else:
        column = column_of("accuracy", None, ())
        right = (score(predict, each, y, "classification")["correct"] for each in (x, x_adv))
        before, after = (float(each.mean()) for each in right)
    arrays = {"x": x, "x_adv": x_adv, "y": y}
    with watched():
        if Path(out).suffix.lower() == ".npz":
            write_npz(Path(out), arrays)
        else:
            write_bytes(Path(out), save({name: each.contiguous() for name, each in arrays.items()}))
    units, norm = units_within(trained, ball), norm or trained.norm
    if json:
        result = {"run": run, "out": out, "attack": attack, "norm": norm, "num": len(x)}
        result |= {"metric": column.name, "clean": before, "attacked": after}
        emit({**result, "threat_model": units})
    else:
        say(f"{attack} within {norm} {said_units(units)}")
        change = f"{column.name} {before:.4g} before, {after:.4g} after"
        say(f"{counted(len(x))}: {change}; arrays in {out}")
