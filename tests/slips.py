"""Slips of one line, planted by someone who had read the package and none of its tests.

    python tests/mutations.py --slips            writes benchmarks/results/slips.{json,md}
    python tests/mutations.py --slips PATTERN    those whose name contains PATTERN

All are in `tests/data/slips.json`, by round. The first were chosen before any test was read: 24 of
the 50 were caught. Tests of the kinds that were missing came then (every setting of every attack,
formulas at any coverage and in any units, both halves, levels of intervals), and the second after
them: 7 of 20. The third were chosen in the same way: 32 of 50. `tests/test_calls.py` came then, and
the fourth after it, at lines of the package that were drawn by chance: 16 of 25. The fifth are at
lines drawn by chance as well, spread over the packages by their size, and were written down before
any was run: 29 of 50. The sixth were drawn after the tests for these: 5 of 12. The seventh were
drawn as the fifth: of the 49 that were run, 22 met a test that failed within twelve seconds of the
processor, the quickest of the tests that reach their line first; at least four more are held by
tests that this did not try. The eighth and ninth are by two further hands, by reading, 50 each
(less what both chose and what has left the package since): 44 were caught, then, after the tests
that these called for, 46.
"""

from __future__ import annotations

from tests.mutations import Bug, read

ROUNDS = {name: [Bug(**slip) for slip in slips] for name, slips in read("slips.json").items()}
SLIPS = tuple(bug for bugs in ROUNDS.values() for bug in bugs)
