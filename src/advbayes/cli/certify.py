"""`advbayes certify`: radii that no attack can beat."""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.checks import counted
from advbayes.cli import flags
from advbayes.cli.screen import emit, say, table
from advbayes.cli.signals import watched
from advbayes.cli.threat import open_run
from advbayes.runs.config import ConfigError


def certify(
    run: flags.Run,
    sigma: Annotated[
        float, typer.Option(min=1e-6, help="Noise of the smoothing, in the model's units")
    ] = 0.25,
    num: flags.Num = 100,
    draws: Annotated[int, typer.Option(min=10, help="Noisy copies of each example")] = 10_000,
    alpha: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Chance that a certificate is wrong")
    ] = 0.001,
    seed: flags.Seed = 0,
    device: flags.Device = "cpu",
    trust_network: flags.Trust = False,
    json: flags.Json = False,
) -> None:
    """Certify L2 radii by randomised smoothing: no perturbation below the radius changes the
    vote, with confidence.

    Examples:

    advbayes certify RUN --sigma 0.25 --num 100

    advbayes certify RUN --sigma 0.5 --draws 100000 --alpha 0.0001
    """
    from advbayes.cli.describe import said_units, units_of
    from advbayes.evaluation.tables import Grid
    from advbayes.predictive import FreshPredictive, Smoothed
    from advbayes.predictive import certify as certified
    from advbayes.progress import Progress
    from advbayes.seeds import generator_for
    from advbayes.store import write_document

    folder, trained, data = open_run(run, trusted=trust_network, device=device)
    if trained.task != "classification":
        wanted = "RUN: must be a classifier to be certified by votes"
        raise ConfigError(f"{wanted}, got a run for {trained.task}")
    x, y = data.x_test[:num], data.y_test[:num]
    # A theta with every draw of the noise: it is the Bayesian vote that is certified.
    smoothed = Smoothed(FreshPredictive(trained.model, trained.posterior, 1), sigma)
    classes, radii = [], []
    with Progress("certify", len(x)) as bar:
        for row in range(len(x)):
            generator = generator_for(seed, "certify", row, device)
            one = certified(smoothed, x[row : row + 1], n=draws, alpha=alpha, generator=generator)
            classes += one.classes.tolist()
            radii += one.radii.tolist()
            bar.advance()
    proven = [
        radius if label == target else -1.0  # a wrong vote has no radius
        for label, target, radius in zip(classes, y.tolist(), radii, strict=True)
    ]
    grid = [sigma * step / 4 for step in range(17)]
    curve = {at: sum(radius >= at for radius in proven) / len(proven) for at in grid}
    units = units_of(sigma, trained.scaling, trained.feature_names)
    abstained = sum(label < 0 for label in classes)
    result = {
        "run": run,
        "sigma": sigma,
        "alpha": alpha,
        "draws": draws,
        "num": len(x),
        "abstained": abstained,
        "classes": classes,
        "radii": radii,
        "curve": [{"radius": at, "certified_accuracy": share} for at, share in curve.items()],
        "threat_model": units,
    }
    with watched(), folder.lock():
        write_document(folder.path / "certificate.json", result)
    if json:
        emit(result)
        return
    if trained.scaling is not None:
        say(said_units(units, "sigma"))
    chance = f"each radius is wrong with chance at most {alpha:g}"
    title = f"{counted(len(x))}, {abstained} abstained; {chance}"
    rows = [(f"{at:.3f}", f"{share:.3f}") for at, share in curve.items() if share > 0 or at == 0]
    table(Grid(("L2 radius", "certified accuracy"), rows, title, right=(0, 1)))
    say(f"Radii: {folder.path / 'certificate.json'}")
