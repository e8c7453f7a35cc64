"""Write a report: one HTML page, Markdown, the results as JSON and the table as CSV."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advbayes.auditing import Verdict
from advbayes.evaluation import Evaluation
from advbayes.report import rendering
from advbayes.report.gather import gather
from advbayes.report.text import clean
from advbayes.store import write_bytes


@dataclass(frozen=True)
class ReportPaths:
    """Where the parts of a report are; `digest` is the SHA-256 of the JSON file."""

    html: Path
    markdown: Path
    json: Path
    csv: Path
    digest: str = ""


def write_report(
    out: str | os.PathLike[str],
    *,
    title: str,
    evaluation: Evaluation,
    reproduce: str | Sequence[str] | Mapping[str, Any] | None = None,
    left_out: Sequence[str] = (),
    **sources: Any,  # those of `Sources`: audit, threat_model, run, history, gallery, ...
) -> ReportPaths:
    """Write report.html, report.md, report.json and report.csv into the folder `out`.

    The evaluation may hold any number of predictors. `audit` maps them to their verdicts; values
    under attack of a predictor without a verdict of level A or B carry a dagger. `run` maps names
    to `config` and `manifest` of a run, `history` predictors to that of `fit`; one alone of any of
    them is that of the first predictor. `reproduce` holds commands, or a mapping with `commands`,
    `commit`, `versions`, `machine` and `folder`; none of it, and nothing else that differs between
    two runs of one seed, is in the JSON file. `left_out` names evaluations that the report does not
    show.

    >>> import tempfile, torch
    >>> from torch.distributions import Categorical
    >>> from advbayes import L2, pgd
    >>> from advbayes.evaluation import evaluate
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> data = torch.tensor([[2.0], [-0.3]]), torch.tensor([0, 1])
    >>> report = evaluate(predict, data, attacks={"PGD": pgd(L2(1.0), steps=5)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = write_report(folder, title="Toy", evaluation=report)
    ...     paths.html.read_text().startswith("<!doctype html>")
    True
    """
    pictures: dict[str, str] = {}
    given: Any = by_name(sources, evaluation.predictors[0])
    document = gather(title=title, evaluation=evaluation, pictures=pictures, **given)
    # Escaped, so that the file stays text even where somebody pastes it into a page.
    results = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
    results = results.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026") + "\n"
    digest = hashlib.sha256(results.encode()).hexdigest()
    said = reproduce if isinstance(reproduce, Mapping) else {"commands": reproduce}
    provenance = provenance_of(said, given.get("run", {}))
    provenance["left_out"] = [clean(name) for name in left_out]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    page, text, data, table = (folder / f"report.{end}" for end in ("html", "md", "json", "csv"))
    for path, content in (
        (page, rendering.page(document, pictures, provenance, digest=digest)),
        (text, rendering.markdown(document, provenance, digest=digest)),
        (data, results),
        (table, rendering.spreadsheet(document)),
    ):
        write_bytes(path, content.encode())
    return ReportPaths(page, text, data, table, digest)


def by_name(sources: Mapping[str, Any], first: str) -> dict[str, Any]:
    """The sources as `gather` takes them: what is None is left out, and a verdict, run or history
    alone is that of the first predictor.

    >>> by_name({"history": {"bound": [1.0]}, "run": None}, "MIX")
    {'history': {'MIX': {'bound': [1.0]}}}
    """
    given = {name: source for name, source in sources.items() if source is not None}
    for name, key in (("audit", "findings"), ("run", "config"), ("history", "bound")):
        match given.get(name):
            case Verdict() as alone:
                given[name] = {first: alone}
            case Mapping() as alone if key in alone:
                given[name] = {first: alone}
    return given


def provenance_of(given: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, Any]:
    """Where and how it was made: commands, commit, machine, as given or from the runs' manifests.

    >>> provenance_of({"commands": ["advbayes demo"]}, {})["commands"]
    ['advbayes demo']
    """
    started = [run["manifest"].get("started") or {} for run in runs.values()]
    lines = given.get("commands") or [
        command_line(one["command"]) for one in started if one.get("command")
    ]
    lines = [lines] if isinstance(lines, str) else lines
    document: dict[str, Any] = {"commands": [clean(line, 2000) for line in lines]}
    for key in ("commit", "machine"):
        values = dict.fromkeys(clean(one[key]) for one in started if one.get(key))
        document[key] = clean(given.get(key) or ", ".join(values))
    versions = given.get("versions", {})
    document["versions"] = {clean(name): clean(version) for name, version in versions.items()}
    document["folder"] = clean(given.get("folder", ""))
    return {key: value for key, value in document.items() if value or key == "commands"}


def command_line(words: Sequence[str]) -> str:
    """Words as a shell takes them, the program by its name.

    >>> command_line(["/usr/bin/advbayes", "train", "--out", "my run"])
    "advbayes train --out 'my run'"
    """
    program, rest = words[:1], words[1:]
    if program and program[0].endswith(("/advbayes", "/__main__.py")):
        program = ["advbayes"]
    return shlex.join([*program, *rest])
