"""What goes wrong with data files, as types: every message says which file, what was wanted, what
came, what to do."""

from __future__ import annotations

from advbayes.checks import InputError, printable

INSTALL = "pip install 'advbayes[data]'"


class DataError(InputError):
    """A data file that cannot be used: truncated, altered, too large, or not what it claims to be.

    >>> raise DataError(problem("wine.csv", "84199 bytes", "12 bytes", "Fetch it again."))
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: wine.csv: wanted 84199 bytes, got 12 bytes. Fetch it again.
    """


class DataMissingError(DataError, FileNotFoundError):
    """A data file that is not there.

    >>> issubclass(DataMissingError, FileNotFoundError), issubclass(DataMissingError, ValueError)
    (True, True)
    """


class DownloadError(DataError):
    """A data file that could not be fetched, or that came with other content than it should have.

    >>> issubclass(DownloadError, DataError)
    True
    """


def problem(file: object, wanted: str, got: str, remedy: str) -> str:
    r"""One sentence for the fault and one for the remedy.

    >>> problem("a.csv", "a header", "numbers", "Name the columns.")
    'a.csv: wanted a header, got numbers. Name the columns.'
    >>> problem("a.csv", "a number", "\x1b[2J", "Drop it.")
    'a.csv: wanted a number, got \\x1b[2J. Drop it.'
    """
    return (
        f"{printable(str(file), 1000)}: wanted {printable(wanted)}, got {printable(got)}. "
        f"{printable(remedy)}"
    )
