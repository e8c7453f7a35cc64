"""A run folder: configuration, history, checkpoints, the model, records, log. What is in it
survives a kill at any moment.

config.toml      every key, defaults included
manifest.json    status, versions, commit, machine, command, the data's SHA-256
history.jsonl    one record a step, up to the last checkpoint
checkpoint/      posterior, optimisers and adversaries at the last checkpoint
model.advbayes   the finished model, which `advbayes.load` reads
evaluation/NAME/ records and adversarial arrays of `advbayes evaluate`, for `load_evaluation`
audit.json       the verdict of `advbayes audit`
certificate.json radii of `advbayes certify`
log.txt          what happened when
.lock            there while a process writes: its pid and host

Names are imported when first used: `runs.config` is read before torch is.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from advbayes.runs.building import Prepared as Prepared
    from advbayes.runs.building import build_defense as build_defense
    from advbayes.runs.building import build_model as build_model
    from advbayes.runs.building import build_net as build_net
    from advbayes.runs.building import prepare as prepare
    from advbayes.runs.folder import Run as Run
    from advbayes.runs.folder import create_run as create_run
    from advbayes.runs.folder import record as record
    from advbayes.runs.named import make_attack as make_attack
    from advbayes.runs.named import make_ball as make_ball
    from advbayes.runs.trained import Trained as Trained
    from advbayes.runs.trained import load_trained as load_trained
    from advbayes.runs.training import follow as follow
    from advbayes.runs.training import train as train
    from advbayes.store import thetas_of as thetas_of

_HOMES = {
    "runs.building": "Prepared build_defense build_model build_net prepare",
    "runs.folder": "Run create_run record",
    "runs.named": "make_attack make_ball",
    "runs.trained": "Trained load_trained",
    "runs.training": "follow train",
    "store": "thetas_of",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'advbayes.runs' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"advbayes.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
