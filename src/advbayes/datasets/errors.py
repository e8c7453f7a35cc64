"""What goes wrong with data files, as types: every message says which file, what was wanted, what
came, what to do."""

from __future__ import annotations

from advbayes.checks import InputError, printable


class DataError(InputError):
    r"""A data file that cannot be used: truncated, altered, too large, or not what it claims to be.

    >>> str(DataError("wine.csv", "84199 bytes", "12 bytes", "Fetch it again."))
    'wine.csv: wanted 84199 bytes, got 12 bytes. Fetch it again.'
    >>> str(DataError("a.csv", "a number", "\x1b[2J"))
    'a.csv: wanted a number, got \\x1b[2J'
    """

    def __init__(self, file: object, wanted: str, got: str, remedy: str = "") -> None:
        file, wanted, got = printable(str(file), 1000), printable(wanted), printable(got, 1000)
        advice = f". {printable(remedy)}" if remedy else ""
        super().__init__(f"{file}: wanted {wanted}, got {got}{advice}")


class DataMissingError(DataError, FileNotFoundError):
    """A data file that is not there."""


class DownloadError(DataError):
    """A data file that could not be fetched, or came with other content than it should have."""
