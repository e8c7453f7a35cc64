"""The playground's page, which `advbayes playground` serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes.experiments import playground
from advbayes.experiments.playground import Panel, World, pictures

EPS, EPS_LIMIT = 0.5, 2.0  # of the slider
PAD = Path(__file__).parent  # the pad to draw a digit on, as the browser gets it
# On a phone streamlit's bar lies over the top of the page.
STYLE = (
    ".block-container{padding-top:2.5rem}"
    "@media(max-width:640px){.block-container{padding-top:4.5rem}}"
)


def page() -> None:
    """Everything that is on the page, from top to bottom; streamlit runs it at every move."""
    import streamlit as st

    st.set_page_config("advbayes playground", layout="wide")
    st.html(f"<style>{STYLE}</style>")
    load = st.cache_resource(show_spinner="Training small models, once")(playground.load_world)
    with st.sidebar:
        world = load(st.radio("What to play with", playground.WORLDS, horizontal=True))
        x, y = _digit(st, world) if world.is_image else _wine(st, world)
        attack = st.selectbox(
            "Attack",
            list(playground.ATTACKS),
            help="; ".join(f"{name}: {what}" for name, what in playground.ATTACKS.items()),
        )
        unit = "pixels in [0, 1]" if world.is_image else "standard deviations"
        eps = st.slider(f"eps (L2, {unit})", 0.0, EPS_LIMIT, EPS, 0.05, key=f"eps-{world.name}")
        shown = st.multiselect("Defenses", playground.DEFENSES, playground.DEFENSES)
        aims = ["each defense", *playground.DEFENSES]
        aim = st.selectbox("The attacked input is made for", aims)
    st.markdown(
        f":blue[**before**] and :orange[**after**] the attack. "
        f"{'' if y is None else f'The truth is **{_truth(world, y)}**.'}"
    )
    st.caption("The controls are in the sidebar; on a phone, behind the arrows at the top.")
    panels = playground.move(
        world,
        x,
        y,
        attack=attack,
        eps=eps,
        defenses=shown or playground.DEFENSES,
        made_for=None if aim == aims[0] else aim,
    )
    for column, panel in zip(st.columns(len(panels)), panels, strict=True):
        with column:
            _show(st, world, panel, y)
    st.caption("Runs on this machine alone and sends nothing.")


def _digit(st: Any, world: World) -> tuple[Tensor, Tensor | None]:
    data = world.data
    number = st.slider("Test image", 0, len(data.x_test) - 1, 0)
    x, y = data.x_test[number], data.y_test[number]
    if not st.toggle("Draw on it"):
        return x, y
    parts = {kind: (PAD / f"pad.{kind}").read_text("utf-8") for kind in ("html", "css", "js")}
    pad = st.components.v2.component("advbayes_pad", **parts)
    drawn = pad(
        data={"pixels": x.flatten().tolist(), "side": x.shape[-1]},
        key=f"pad-{number}",
        on_pixels_change=lambda: None,
    )
    changed = pixels(drawn.get("pixels"), x)
    return (x, y) if changed is None else (changed, None)


def pixels(sent: Any, like: Tensor) -> Tensor | None:  # (1, H, W)
    """What the pad sent, as an image; None where nothing was drawn, or nothing that is an image.

    >>> blank = torch.zeros(1, 2, 2)
    >>> pixels([0, 0.5, 0, 2], blank)
    tensor([[[0.0000, 0.5000],
             [0.0000, 1.0000]]])
    >>> pixels(None, blank), pixels([1], blank), pixels(["a"] * 4, blank)
    (None, None, None)
    """
    try:
        values = torch.tensor([float(each) for each in sent], dtype=like.dtype)
    except (TypeError, ValueError):
        return None
    if values.numel() != like.numel() or not values.isfinite().all():
        return None
    image = values.clamp(0, 1).view_as(like)
    return None if image.equal(like) else image


def _wine(st: Any, world: World) -> tuple[Tensor, Tensor | None]:
    data = world.data
    number = st.slider("Test wine", 0, len(data.x_test) - 1, 0)
    x, y = data.x_test[number], data.y_test[number]
    raw, all_rows = world.raw(x), world.raw(data.x_train)
    low, high = all_rows.min(0).values.minimum(raw), all_rows.max(0).values.maximum(raw)
    moved = raw.clone()
    with st.expander("Its features", expanded=True):
        for i, name in enumerate(data.dataset.feature_names):
            start, ends = float(raw[i]), (float(low[i]), float(high[i]))
            step = max(ends[1] - ends[0], 1e-6) / 200
            value = st.slider(name, *ends, start, step, format="%.4g", key=f"{name}-{number}")
            if value != start:
                moved[i] = value
    return (x, y) if moved.equal(raw) else (world.seen(moved), None)


def _truth(world: World, y: Tensor) -> str:
    if world.task == "classification":
        return world.data.dataset.class_names[int(y)]
    scaling = world.data.scaling
    assert scaling is not None
    return f"{float(scaling.inverse_target(y)):g}"


def _show(st: Any, world: World, panel: Panel, y: Tensor | None) -> None:
    names, before, after = world.data.dataset.class_names, panel.clean, panel.attacked
    moved = panel.x_adv - panel.x
    largest = max(float(moved.abs().max()), 1e-6)
    drawn = []
    if world.is_image:
        added = pictures.difference(moved, largest)
        three = (pictures.image(panel.x), added, pictures.image(panel.x_adv))
        cells = "".join(f'<div style="flex:1">{each}</div>' for each in three)
        drawn.append(f'<div style="display:flex;gap:6px">{cells}</div>')
    if world.task == "classification":
        drawn.append(pictures.bars(names, before, after, None if y is None else int(y)))
    else:
        known = None if y is None else float(_truth(world, y))
        drawn.append(pictures.density(before, after, known))
    if not world.is_image:
        drawn.append(pictures.shifts(world.data.dataset.feature_names, moved, largest))
    st.markdown(f"**{panel.defense}**\n\n{_verdict(world, panel)}")
    st.html("".join(drawn))
    st.caption(_behind(panel))


def _verdict(world: World, panel: Panel) -> str:
    before, after = panel.clean, panel.attacked
    if world.task == "regression":
        (name,) = world.data.dataset.target_names
        moved = f"{before.mean:.2f} ± {before.sd:.2f} → **{after.mean:.2f} ± {after.sd:.2f}**"
        return f"{name} {moved}"
    names = world.data.dataset.class_names
    first, last = (100 * float(each.values[before.label]) for each in (before, after))
    if panel.broken:
        return f":red[broken]: {names[before.label]} → **{names[after.label]}**"
    return f":green[holds]: **{names[before.label]}**, {first:.0f} % → {last:.0f} %"


def _behind(panel: Panel) -> str:
    moved = f"moved by {panel.norm:.2f}"
    if panel.evidence is None or panel.ess is None:
        return moved
    return (
        f"{moved}; log evidence {panel.evidence[0]:.1f} → {panel.evidence[1]:.1f}; "
        f"effective sample size {panel.ess[0]:.1f} → {panel.ess[1]:.1f}"
    )


if __name__ == "__main__":
    page()
