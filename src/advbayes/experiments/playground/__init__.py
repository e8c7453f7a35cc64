"""The playground without its page: small models in a cache folder, one move, its pictures.

worlds    what there is to play with: data, three trained models and a purifier
moves     one input, one attack, one eps: what each defense answers before and after
pictures  inputs, perturbations and predictives as SVG
"""

from __future__ import annotations

from advbayes.experiments.playground.moves import ATTACKS, Answer, Panel, move
from advbayes.experiments.playground.worlds import (
    DEFENSES,
    WORLDS,
    World,
    load_world,
    playground_folder,
)

__all__ = [
    "ATTACKS",
    "DEFENSES",
    "WORLDS",
    "Answer",
    "Panel",
    "World",
    "load_world",
    "move",
    "playground_folder",
]
