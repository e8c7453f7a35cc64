"""Draws the diagrams of the documentation: `python docs/figures/diagrams.py`.

A diagram is a row or two of boxes and the arrows between them, as SVG text.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
INK, FRAME, FILL, ACCENT = "#1f2933", "#7b8794", "#f5f7fa", "#d55e00"
WIDTH, HEIGHT, GAP, MARGIN = 128, 64, 28, 12

Box = tuple[str, str]  # the module's name, what happens there


def text(x: float, y: float, line: str, *, bold: bool = False, size: int = 11) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}"{weight}>'
        f"{escape(line)}</text>"
    )


def box(x: float, y: float, name: str, lines: str, accent: bool = False) -> str:
    stroke = ACCENT if accent else FRAME
    parts = [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{FILL}" '
        f'stroke="{stroke}" stroke-width="1.5"/>',
        text(x + WIDTH / 2, y + 18, name, bold=True, size=12),
    ]
    for number, line in enumerate(lines.split("\n")):
        parts.append(text(x + WIDTH / 2, y + 35 + 14 * number, line, size=10))
    return "".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def page(body: str, width: float, height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" font-family="sans-serif" fill="{INK}" role="img">'
        f"<title>{escape(title)}</title>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>{body}</svg>\n'
    )


def flow(title: str, modules: list[Box], per_row: int = 4) -> str:
    """Modules in the order in which data pass through them, in rows of `per_row`."""
    assert len(modules) <= 8
    parts, places = [], []
    for number, (name, lines) in enumerate(modules):
        row, column = divmod(number, per_row)
        x, y = MARGIN + column * (WIDTH + GAP), MARGIN + row * (HEIGHT + GAP + 6)
        places.append((x, y))
        parts.append(box(x, y, name, lines))
    for (x1, y1), (x2, y2) in pairwise(places):
        if y1 == y2:
            parts.append(arrow(x1 + WIDTH, y1 + HEIGHT / 2, x2, y2 + HEIGHT / 2))
        else:
            middle = y1 + HEIGHT + GAP / 2 + 3
            path = f"M{x1 + WIDTH / 2} {y1 + HEIGHT}V{middle}H{x2 + WIDTH / 2}V{y2}"
            parts.append(
                f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.5" '
                'marker-end="url(#tip)"/>'
            )
    columns, rows = min(len(modules), per_row), -(-len(modules) // per_row)
    width = 2 * MARGIN + columns * WIDTH + (columns - 1) * GAP
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * (GAP + 6)
    return page("".join(parts), width, height, title)


FLOWS = {
    "training-step": (
        "A training step: data through the modules of the package",
        [
            ("training", "fit: a batch, a seed,\nAdam on -bound / N"),
            ("objectives", "ChannelELBO.terms\nEq. 11"),
            ("posteriors", "theta = at(noise)\nKL(q, prior)"),
            ("channels", "x' drawn from\np(x' | x, theta)"),
            ("attacks", "input gradient,\na move in the ball"),
            ("model", "the net's output\nat theta"),
            ("likelihoods", "log p(y | output)"),
        ],
    ),
    "purified-query": (
        "A purified query: x' through the modules of the package",
        [
            ("model", "once: p(y | x_n, theta_s)\nfor all n and s"),
            ("channels", "once: the density's\ncentres for all n, s"),
            ("purification", "x' against all centres:\nweights w_sn"),
            ("torch.distributions", "p(y | x'), with its\nexact gradient"),
        ],
    ),
    "evaluation": (
        "An evaluation: examples through the modules of the package",
        [
            ("evaluation", "a batch, a key for\nits randomness"),
            ("attacks", "x' in the ball,\nbest iterate kept"),
            ("predictive", "p(y | x') through\nall thetas"),
            ("metrics", "one score for each\nexample, intervals"),
            ("store", "records and arrays,\nhashed, on disk"),
            ("auditing", "may the numbers\nbe believed?"),
            ("report", "HTML, Markdown,\nJSON, CSV"),
        ],
    ),
}


def stories() -> str:
    """The two stories about the label: reactive above, proactive below."""
    parts = []
    columns = [MARGIN + number * (WIDTH + 40) for number in range(4)]
    for row, (name, boxes) in enumerate(
        (
            (
                "Reactive: the label belongs to the clean input",
                [
                    ("x", "clean, never seen"),
                    ("channel", "p(x' | x, theta)"),
                    ("x'", "what we see"),
                    ("infer x, then y", "p(y | x', D)\nEq. 4, Eq. 5"),
                ],
            ),
            (
                "Proactive: the label must be right at the attacked input",
                [
                    ("x, y", "training data"),
                    ("channel", "x' drawn in training"),
                    ("robust posterior", "p_R(theta | D)\nEq. 6 to 11"),
                    ("predict as usual", "p_R(y | x')\nEq. 9"),
                ],
            ),
        )
    ):
        top = MARGIN + 22 + row * (HEIGHT + 50)
        parts.append(
            f'<text x="{MARGIN}" y="{top - 8}" font-size="13" font-weight="bold">{name}</text>'
        )
        for x, (head, lines) in zip(columns, boxes, strict=True):
            parts.append(box(x, top, head, lines, accent=head == "channel"))
        for x1, x2 in pairwise(columns):
            parts.append(arrow(x1 + WIDTH, top + HEIGHT / 2, x2, top + HEIGHT / 2))
    width = columns[-1] + WIDTH + MARGIN
    return page("".join(parts), width, 2 * (HEIGHT + 50) + MARGIN, "Two stories about the label")


def main() -> None:
    for name, (title, modules) in FLOWS.items():
        (HERE / f"{name}.svg").write_text(flow(title, modules))
    (HERE / "stories.svg").write_text(stories())


if __name__ == "__main__":
    main()
