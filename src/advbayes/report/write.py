"""Write a report: one HTML page, Markdown, the results as JSON and the table as CSV."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from advbayes.evaluation import Evaluation
from advbayes.report import rendering
from advbayes.report.gather import Sources, each_run, gather
from advbayes.report.text import clean
from advbayes.store import write_bytes


@dataclass(frozen=True)
class ReportPaths:
    """Where the parts of a report are; `digest` is the SHA-256 of the JSON file, the same for two
    runs of one seed."""

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
    **sources: Unpack[Sources],  # audit, threat_model, run, history, gallery, class_names, ...
) -> ReportPaths:
    """Write report.html, report.md, report.json and report.csv into the folder `out`.

    The evaluation may hold any number of predictors. `audit` is a Verdict (or its JSON) of the
    first of them, or a mapping from predictors to verdicts; values under attack of a predictor
    without a verdict of level A or B carry a dagger. `threat_model` is a ThreatModel or a
    dictionary; `run` holds `config` and `manifest` of a run, or maps names to such; `history` is
    that of `fit` or of a run, or maps predictors to such; `scaling` a Standardize or its
    dictionary. `reproduce` holds commands, or a dictionary with `commands`, `commit`, `versions`,
    `machine`. None of it, and nothing else that differs between two runs of one seed, is in the
    JSON file. `left_out` names evaluations that the report does not show.

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
    provenance = provenance_of(reproduce, sources.get("run"))
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


def provenance_of(reproduce: Any, run: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where and how it was made: commands, commit, machine, as given or from the runs' manifests.

    >>> provenance_of("advbayes demo", None)["commands"]
    ['advbayes demo']
    """
    named = dict(reproduce) if isinstance(reproduce, Mapping) else {"commands": reproduce or []}
    commands = named.get("commands", named.get("command", []))
    lines = [commands] if isinstance(commands, str) else list(commands)
    manifests = [one.get("manifest") or {} for one in each_run(run).values()]
    started = [dict(manifest.get("started") or {}) for manifest in manifests]
    if not lines:
        lines = [command_line(one["command"]) for one in started if one.get("command")]
    document: dict[str, Any] = {"commands": [clean(line, 2000) for line in lines]}
    for key in ("commit", "machine"):
        values = dict.fromkeys(clean(one[key]) for one in started if one.get(key))
        document[key] = clean(named.get(key) or ", ".join(values))
    versions = dict(named.get("versions") or {})
    document["versions"] = {clean(name): clean(version) for name, version in versions.items()}
    document["folder"] = clean(named.get("folder") or "")
    return {key: value for key, value in document.items() if value or key == "commands"}


def command_line(words: Any) -> str:
    """Words as a shell takes them, the program by its name.

    >>> command_line(["/usr/bin/advbayes", "train", "--out", "my run"])
    "advbayes train --out 'my run'"
    """
    if isinstance(words, str):
        return words
    parts = [str(word) for word in words]
    if parts and parts[0].endswith(("/advbayes", "/__main__.py")):
        parts[0] = "advbayes"
    return shlex.join(parts)
