"""`fit`, one loop for every defense: its data (`batches`), its step (`steps`) and the loop around
them (`loop`)."""

from advbayes.training.loop import COLUMNS as COLUMNS
from advbayes.training.loop import FitResult as FitResult
from advbayes.training.loop import NonFiniteError as NonFiniteError
from advbayes.training.loop import SkippedStepWarning as SkippedStepWarning
from advbayes.training.loop import State as State
from advbayes.training.loop import fit as fit
