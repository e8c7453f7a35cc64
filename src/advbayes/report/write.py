"""Write a report: one HTML page, Markdown, the results as JSON and the table as CSV."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from advbayes.evaluation import Evaluation
from advbayes.report import rendering
from advbayes.report.gather import Sources, gather
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
    reproduce: Mapping[str, Any] = MappingProxyType({}),
    left_out: Sequence[str] = (),
    **sources: Unpack[Sources],  # audit, threat_model, run, history, gallery, class_names, ...
) -> ReportPaths:
    """Write report.html, report.md, report.json and report.csv into the folder `out`.

    The evaluation may hold any number of predictors. `audit` maps them to their verdicts; values
    under attack of a predictor without a verdict of level A or B carry a dagger. `run` maps names
    to `config` and `manifest` of a run, `history` predictors to that of `fit`. `reproduce` may hold
    `commands`, `commit`, `versions`, `machine` and `folder`; none of it, and nothing else that
    differs between two runs of one seed, is in the JSON file. `left_out` names evaluations that the
    report does not show.

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
    document = gather(title=title, evaluation=evaluation, pictures=pictures, **sources)
    # Escaped, so that the file stays text even where somebody pastes it into a page.
    results = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
    results = results.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026") + "\n"
    digest = hashlib.sha256(results.encode()).hexdigest()
    provenance = provenance_of(reproduce, sources.get("run", {}))
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


def provenance_of(given: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, Any]:
    """Where and how it was made: commands, commit, machine, as given or from the runs' manifests.

    >>> provenance_of({"commands": ["advbayes demo"]}, {})["commands"]
    ['advbayes demo']
    """
    started = [run["manifest"].get("started") or {} for run in runs.values()]
    lines = given.get("commands") or [
        command_line(one["command"]) for one in started if one.get("command")
    ]
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
