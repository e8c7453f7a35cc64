"""Files that can be trusted: bundles, checkpoints, locks and record logs, without pickle."""

from .bundle import Bundle, RawPredictor, load, model_file, save, thetas_of
from .documents import JSON, RecordLog, read_document, write_document
from .errors import DiskFullError, LockedError, MissingError, NotWritableError, StoreError
from .files import Lock, claim, write_bytes
from .parts import (
    SCHEMA,
    SUFFIX,
    Manifest,
    Part,
    read_bundle,
    read_manifest,
    versions,
    write_bundle,
)

__all__ = [
    "JSON",
    "SCHEMA",
    "SUFFIX",
    "Bundle",
    "DiskFullError",
    "Lock",
    "LockedError",
    "Manifest",
    "MissingError",
    "NotWritableError",
    "Part",
    "RawPredictor",
    "RecordLog",
    "StoreError",
    "claim",
    "load",
    "model_file",
    "read_bundle",
    "read_document",
    "read_manifest",
    "save",
    "thetas_of",
    "versions",
    "write_bundle",
    "write_bytes",
    "write_document",
]
