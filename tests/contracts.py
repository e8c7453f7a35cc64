"""The contracts that the package ships. A new member is one row in `tests/test_contracts.py`."""

from advbayes.testing import AttackContract as AttackContract
from advbayes.testing import ChannelContract as ChannelContract
from advbayes.testing import PosteriorContract as PosteriorContract
from advbayes.testing import PredictorContract as PredictorContract
from advbayes.testing import seeded as seeded
from advbayes.testing import small_data as small_data
from advbayes.testing import small_model as small_model
