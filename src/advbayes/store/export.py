"""The predictive as a program that needs nothing of this library: `torch.export`, or ONNX."""

from __future__ import annotations

import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.export import Dim, ExportedProgram
from torch.func import functional_call

from advbayes.checks import describe
from advbayes.likelihoods import mix
from advbayes.predictive import PosteriorPredictive

from .errors import StoreError
from .files import write_bytes

_TOLERANCE = 1e-4  # of log-probabilities, and of means and variances in units of their size


class _Program(nn.Module):
    """x -> log-probabilities (B, C), or mean and variance (B,) or (B, D): the predictive by its formula (Eq. 9)."""

    thetas: Tensor

    def __init__(self, predict: PosteriorPredictive) -> None:
        super().__init__()
        self.net = predict.model.net
        self.model = predict.model
        self.register_buffer("thetas", predict.thetas)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs, extras = zip(*(self._at(theta, x) for theta in self.thetas), strict=True)
        return _outputs(mix(self.model.likelihood(torch.stack(outputs), torch.stack(extras))))

    def _at(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """`model.output` without what makes it fast for fixed sizes."""
        sizes = [math.prod(shape) for shape in self.model.shapes]
        *flat, extra = torch.split(theta, [*sizes, len(theta) - sum(sizes)])
        weights = {name: part.view(shape) for name, part, shape in zip(self.model.names, flat, self.model.shapes, strict=True)}
        output: Tensor = functional_call(self.net, weights, (x,))
        return output.unsqueeze(-1) if output.ndim == 1 else output, extra


def _outputs(prediction: Distribution) -> tuple[Tensor, ...]:
    if isinstance(prediction, Categorical):
        return (prediction.logits.log_softmax(-1),)
    return prediction.mean, prediction.variance


def export_program(predict: PosteriorPredictive, path: str | os.PathLike[str], x: Tensor) -> None:
    """Write the predictive for use without this library: a `.pt2` file (torch.export) or an `.onnx` file, batch size free.

    It maps x to a tuple: log-probabilities, or mean and variance. `x` is an example batch; on it, and on other batch
    sizes, the exported program is compared with the predictive before anything is written.

    >>> from advbayes import BayesianModel, Categorical, MeanField
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> predict = PosteriorPredictive(model, MeanField(model).sample(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_program(predict, f"{folder}/predict.pt2", torch.randn(5, 4))
    ...     os.listdir(folder)
    ['predict.pt2']
    """
    target = Path(path)
    if target.suffix not in (".pt2", ".onnx"):
        raise StoreError(path, wanted="a name that ends in .pt2 (torch.export) or .onnx", got=target.name)
    if not isinstance(x, Tensor) or x.ndim < 2 or len(x) < 2:
        raise ValueError(f"x must be an example batch of at least two inputs, got {describe(x)}")
    exported = _traced(_Program(predict), x, path)
    batches = [x, x[:1], torch.cat([x, x.flip(0), x[:1]])]
    wanted = [_outputs(predict(batch)) for batch in batches]
    module = exported.module()
    _compare(path, wanted, [module(batch) for batch in batches])
    if target.suffix == ".pt2":
        buffer = io.BytesIO()
        with _silent():
            torch.export.save(exported, buffer)
        write_bytes(target, buffer.getvalue())
    else:
        data = _onnx(exported, path)
        _compare(path, wanted, _run_onnx(data, batches))
        write_bytes(target, data)


def _traced(program: _Program, x: Tensor, path: str | os.PathLike[str]) -> ExportedProgram:
    try:
        with _silent(), torch.no_grad():
            return torch.export.export(program, (x,), dynamic_shapes=((Dim.DYNAMIC, *(Dim.STATIC for _ in x.shape[1:])),))
    except Exception as error:  # torch.export raises what the net's own code makes it raise
        raise StoreError(path, wanted="a network that torch.export can trace", got=f"{error!s:.300}") from error


def _onnx(exported: ExportedProgram, path: str | os.PathLike[str]) -> bytes:
    try:
        with _silent(), tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "program.onnx"
            torch.onnx.export(exported, (), file, external_data=False, verbose=False)
            return file.read_bytes()
    except ImportError as error:
        raise StoreError(path, wanted="onnx and onnxscript (pip install 'advbayes[onnx]')", got=str(error)) from None
    except Exception as error:
        raise StoreError(path, wanted="a network that ONNX can express", got=f"{error!s:.300}") from error


def _run_onnx(data: bytes, batches: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """By the reference evaluator of onnx, slow and independent of torch."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(onnx.load_model_from_string(data))
    (name,) = session.input_names
    return [tuple(map(torch.as_tensor, session.run(None, {name: batch.cpu().numpy()}))) for batch in batches]


def _compare(path: str | os.PathLike[str], wanted: list[tuple[Tensor, ...]], got: list[tuple[Tensor, ...]]) -> None:
    for expected, came in zip(wanted, got, strict=True):
        for one, other in zip(expected, came, strict=True):
            if one.shape != other.shape:
                raise StoreError(path, wanted=f"an output of shape {tuple(one.shape)}", got=f"{tuple(other.shape)}")
            error = float(((one - other.to(one.device)).abs() / (1 + one.abs())).max())
            if not error <= _TOLERANCE:
                raise StoreError(path, wanted=f"the predictive within {_TOLERANCE}", got=f"a difference of {error:.3g}")


@contextmanager
def _silent() -> Iterator[None]:
    """The exporters warn about their own insides."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
