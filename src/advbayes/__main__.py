"""`python -m advbayes` is `advbayes`."""

from __future__ import annotations

import sys

from advbayes.cli import main

if __name__ == "__main__":
    sys.exit(main())
