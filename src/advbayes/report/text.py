"""Strings from outside, made harmless wherever they are printed, and readable numbers."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable

LONGEST = 160
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_ENTITIES = dict(zip("<>&@", ("&lt;", "&gt;", "&amp;", "&#64;"), strict=True))
_DEAD = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]#|~!$"} | _ENTITIES)
_SCHEME = re.compile(r"\b([a-z][a-z0-9+.-]*):(?=\S)", re.I)
_COMPUTED = "=+-@|%＝＋－＠\t\r\n"
_LIST = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")


def clean(value: object, limit: int = LONGEST) -> str:
    """One line of visible text: what cannot be seen is spelled out.

    >>> clean("a\\n b\\u202e")
    'a b\\\\u202e'
    """
    text = " ".join(str(value).split())
    if not text.isascii() or not text.isprintable():
        text = "".join(
            f"\\u{ord(c):04x}" if unicodedata.category(c) in _HIDDEN else c for c in text
        )
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def inert_markdown(value: object) -> str:
    """Text for Markdown, in which nothing is markup.

    >>> [*map(inert_markdown, ("MIX", "[a](javascript:b)", "<b>|", "- 1", "1. x", "0.2"))]
    ['MIX', '\\\\[a\\\\](javascript&#58;b)', '&lt;b&gt;\\\\|', '&#45; 1', '1&#46; x', '0.2']
    """
    # a scheme: what a renderer would turn into a link by itself
    text = _SCHEME.sub(r"\1&#58;", clean(value, 10_000).translate(_DEAD))
    text = _LIST.sub(lambda match: f"{match.group(1)}&#{ord(match.group(2))};", text)
    return re.sub(r"\b(www)\.", r"\1&#46;", text, flags=re.I)


def inert_cell(value: float | str | None) -> float | str | None:
    """A cell of a spreadsheet, in which text is never computed.

    >>> inert_cell("=1+1"), inert_cell(-0.5), inert_cell("a")
    ("'=1+1", -0.5, 'a')
    """
    match value:
        case str() if value and value[0] in _COMPUTED:
            return f"'{value}"
    return value


def number(value: float | str | None) -> str:
    """A number in a sentence or a table.

    >>> number(0.61234), number(1234.5), number(0.00032), number("inf"), number(2)
    ('0.612', '1,234', '0.0003', '∞', '2')
    """

    def text(size: float) -> str:
        if type(value) is int or size >= 1000:
            return f"{size:,.0f}"
        return f"{size:.4f}" if 0.00005 <= size < 0.0005 else f"{size:.3f}"

    return _signed(value, text)


def short(value: float | str | None, digits: int = 4) -> str:
    """A setting rather than a measurement: as few digits as it has.

    >>> short(1.0), short(0.25), short(None)
    ('1', '0.25', '–')
    """
    return _signed(value, lambda size: f"{size:.{digits}g}")


def percent(value: float | str | None, digits: int = 1) -> str:
    """A share.

    >>> percent(0.6123)
    '61.2'
    """
    return _signed(value, lambda size: f"{100 * size:.{digits}f}")


def _signed(value: float | str | None, text: Callable[[float], str]) -> str:
    """A dash for None, the size as text otherwise; the document keeps infinities as text."""
    if value is None:
        return "–"
    size = abs(float(value))
    return f"{'−' if float(value) < 0 else ''}{text(size) if size < math.inf else '∞'}"
