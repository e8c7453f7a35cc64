"""`advbayes certify`: radii that no attack can beat."""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.cli.screen import Device, Json, Run, Trust, emit, say, table, usable
from advbayes.cli.signals import watched

HELP = """Certify L2 radii by randomised smoothing: no perturbation below the radius changes the
vote, with confidence.

Examples:

advbayes certify RUN --sigma 0.25 --num 100

advbayes certify RUN --sigma 0.5 --draws 100000 --alpha 0.0001
"""


def add_to(app: typer.Typer) -> None:
    app.command("certify", help=HELP)(certify)


def certify(
    run: Run,
    sigma: Annotated[
        float, typer.Option(min=1e-6, help="Noise of the smoothing, in the model's units")
    ] = 0.25,
    num: Annotated[int, typer.Option(min=1, help="How many test examples, from the first")] = 100,
    draws: Annotated[int, typer.Option(min=10, help="Noisy copies of each example")] = 10_000,
    alpha: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Chance that a certificate is wrong")
    ] = 0.001,
    seed: Annotated[int, typer.Option(min=0, help="Keys the noise")] = 0,
    device: Device = "cpu",
    trust_network: Trust = False,
    json: Json = False,
) -> None:
    import torch

    from advbayes.cli.describe import said_units, units_of
    from advbayes.evaluation.tables import Grid
    from advbayes.predictive import FreshPredictive, Smoothed
    from advbayes.predictive import certify as certified
    from advbayes.progress import Progress
    from advbayes.runs import Run as Folder
    from advbayes.runs import load_trained, prepare
    from advbayes.runs.config import ConfigError
    from advbayes.seeds import generator_for
    from advbayes.store import write_document

    folder = Folder.open(run)
    config = folder.config
    torch.set_num_threads(config.threads)
    trained = load_trained(run, trusted=trust_network).to(usable(device))
    if trained.task != "classification":
        raise ConfigError(
            f"RUN: must be a classifier to be certified by votes, got a run for {trained.task}"
        )
    data = prepare(config).to(device)
    x, y = data.x_test[:num], data.y_test[:num]
    # A theta with every draw of the noise: it is the Bayesian vote that is certified.
    smoothed = Smoothed(FreshPredictive(trained.model, trained.posterior, 1), sigma)
    classes, radii = [], []
    with Progress("certify", len(x)) as bar:
        for row in range(len(x)):
            certificates = certified(
                smoothed,
                x[row : row + 1],
                n=draws,
                alpha=alpha,
                generator=generator_for(seed, "certify", row, device),
            )
            classes += certificates.classes.tolist()
            radii += certificates.radii.tolist()
            bar.advance()
    grid = [sigma * step / 4 for step in range(17)]
    right = [label == target for label, target in zip(classes, y.tolist(), strict=True)]
    curve = [
        sum(ok and radius >= at for ok, radius in zip(right, radii, strict=True)) / len(radii)
        for at in grid
    ]
    result = {
        "run": run,
        "sigma": sigma,
        "alpha": alpha,
        "draws": draws,
        "num": len(x),
        "abstained": sum(label < 0 for label in classes),
        "classes": classes,
        "radii": radii,
        "curve": [
            {"radius": at, "certified_accuracy": share}
            for at, share in zip(grid, curve, strict=True)
        ],
        "threat_model": units_of(sigma, trained.scaling, trained.feature_names),
    }
    with watched(), folder.lock():
        write_document(folder.path / "certificate.json", result)
    if json:
        emit(result)
        return
    if trained.scaling is not None:
        say(
            f"sigma in both units: "
            f"{said_units(units_of(sigma, trained.scaling, trained.feature_names))}"
        )
    title = (
        f"{len(x)} examples, {result['abstained']} abstained; each radius is wrong with chance at "
        f"most {alpha:g}"
    )
    rows = [
        (f"{at:.3f}", f"{share:.3f}")
        for at, share in zip(grid, curve, strict=True)
        if share > 0 or at == 0
    ]
    table(Grid(("L2 radius", "certified accuracy"), rows, title, right=(0, 1)))
    say(f"Radii: {folder.path / 'certificate.json'}")
