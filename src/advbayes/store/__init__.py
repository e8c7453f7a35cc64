"""Files that can be trusted: bundles, checkpoints, locks and record logs, without pickle."""

from .bundle import Bundle, load, model_file, save
from .documents import JSON, read_document, write_document
from .errors import DiskFullError, LockedError, MissingError, NotWritableError, StoreError
from .files import write_bytes
from .lock import Lock, claim
from .manifest import SCHEMA, Manifest, Part, versions
from .parts import SUFFIX, read_bundle, read_manifest, write_bundle
from .raw import RawPredictor, thetas_of
from .records import RecordLog

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
