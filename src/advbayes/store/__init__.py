"""Files that can be trusted: bundles, checkpoints, locks and record logs, without pickle."""

from .documents import JSON, read_document, write_document
from .errors import DiskFullError, LockedError, MissingError, StoreError
from .files import write_bytes
from .lock import Lock, claim
from .manifest import SCHEMA, Manifest, Part, versions
from .parts import SUFFIX, read_bundle, read_manifest, write_bundle
from .records import RecordLog

__all__ = [
    "JSON",
    "SCHEMA",
    "SUFFIX",
    "DiskFullError",
    "Lock",
    "LockedError",
    "Manifest",
    "MissingError",
    "Part",
    "RecordLog",
    "StoreError",
    "claim",
    "read_bundle",
    "read_document",
    "read_manifest",
    "versions",
    "write_bundle",
    "write_bytes",
    "write_document",
]
