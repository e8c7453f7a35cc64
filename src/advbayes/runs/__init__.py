"""A run folder: configuration, history, checkpoints, the model, records, log. What is in it
survives a kill at any moment.

config.toml      every key, defaults included
manifest.json    status, versions, commit, machine, command, the data's SHA-256
history.jsonl    one record a step, up to the last checkpoint
checkpoint/      posterior, optimisers and adversaries at the last checkpoint
model.advbayes   the finished model, which `advbayes.load` reads
evaluation/NAME/ records and adversarial arrays of `advbayes evaluate`
(`advbayes.evaluation.load_evaluation` reads them) audit.json       the verdict of `advbayes audit`
certificate.json radii of `advbayes certify`
log.txt          what happened when
.lock            there while a process writes: its pid and host
"""

from __future__ import annotations

from advbayes.runs.attacking import make_attack
from advbayes.runs.building import (
    Prepared,
    build_defense,
    build_model,
    build_net,
    make_ball,
    prepare,
)
from advbayes.runs.folder import Run, create_run, record
from advbayes.runs.trained import Trained, load_trained
from advbayes.runs.training import train
from advbayes.store import thetas_of

__all__ = [
    "Prepared",
    "Run",
    "Trained",
    "build_defense",
    "build_model",
    "build_net",
    "create_run",
    "load_trained",
    "make_attack",
    "make_ball",
    "prepare",
    "record",
    "thetas_of",
    "train",
]
