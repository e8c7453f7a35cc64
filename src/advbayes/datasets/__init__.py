"""The data sets, downloaded once and checked, or read from a local folder; a user's own tables and
arrays; scaling."""

from __future__ import annotations

from advbayes.datasets.dataset import Dataset, Provenance, class_weights, split_rows
from advbayes.datasets.encoding import Encoding
from advbayes.datasets.errors import DataError, DataMissingError, DownloadError
from advbayes.datasets.loading import find_dataset, load_dataset, names
from advbayes.datasets.own import from_csv, from_npz
from advbayes.datasets.scaling import Standardize
from advbayes.datasets.sources import SOURCES

__all__ = [
    "SOURCES",
    "DataError",
    "DataMissingError",
    "Dataset",
    "DownloadError",
    "Encoding",
    "Provenance",
    "Standardize",
    "class_weights",
    "find_dataset",
    "from_csv",
    "from_npz",
    "load_dataset",
    "names",
    "split_rows",
]
