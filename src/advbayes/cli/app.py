"""The commands; errors and signals as exit codes: 0 done, 1 a bug, 2 a mistake, 130, 143."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from typing import Annotated, Any

import typer

from advbayes import __version__
from advbayes.checks import AdvBayesError, inert
from advbayes.cli import attack, audit, certify, evaluate, experiments, looking, predict, train
from advbayes.cli.screen import fault, warn
from advbayes.cli.signals import Stopped, watched
from advbayes.runs.config import ConfigError

# A wrong flag, a missing argument: of click, or of the copy of it that newer typers bring.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
SHARED = ("train", "evaluate", "audit")  # what several ranks can do together

app = typer.Typer(
    name="advbayes",
    help="Train Bayesian models that withstand attacks, attack them, and find out whether the "
    "numbers may be believed.",
    epilog="Start with `advbayes demo`. Exit codes: 0 done, 1 a bug, 2 a mistake named in the "
    "message, 130 and 143 signals.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"advbayes {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    pass


COMMANDS: tuple[Callable[..., object], ...] = (
    *(experiments.demo, train.train, predict.predict, attack.attack, evaluate.evaluate),
    *(audit.audit, certify.certify, looking.report, experiments.reproduce, experiments.compare),
    *(looking.datasets, looking.show, experiments.playground),
)
for command in COMMANDS:  # in the list of commands: the first sentence, on one line
    about = (inspect.getdoc(command) or "").partition("\n\n")[0].replace("\n", " ")
    app.command(command.__name__, short_help=about)(command)


def run(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code."""
    if argv is None:  # a library's warning as one line, without the source line that gave it
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
    try:
        # the console program leaves at once until there is work
        words = list(sys.argv[1:] if argv is None else argv)
        with watched() if argv is not None else nullcontext(), _ranks(words):
            return int(app(args=words, prog_name="advbayes", standalone_mode=False) or 0)
    except Stopped as stopped:
        if argv is None:  # threads of C libraries may abort while the interpreter is taken down
            os._exit(stopped.code)
        return stopped.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _USAGE_ERROR as error:
        if message := error.format_message():
            for each in getattr(error.__cause__, "errors", list)():  # pydantic's: what came
                message = f"{message.removesuffix('.')}, got {each['input']!r:.80}"
            place = error.ctx.command_path if error.ctx else "advbayes"
            fault(f"{message} (`{place} --help` shows how)")
        return int(error.exit_code)
    except Exception as error:
        if is_mistake(error) and not os.environ.get("ADVBAYES_TRACEBACK"):
            fault(str(error) or type(error).__name__)
            return 2
        if (wanted := memory_wanted(error)) is not None:
            fault(
                f"out of memory: {wanted}; a smaller --batch-size, --num, --thetas or --num-train "
                f"needs less"
            )
            return 2
        print(inert(traceback.format_exc()), end="", file=sys.stderr)
        fault("this is a bug, not a mistake of yours; please report it with the lines above")
        return 1


@contextmanager
def _ranks(argv: Sequence[str]) -> Iterator[None]:
    """Under torchrun: the ranks for the length of the command, of which the first one speaks."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if not argv or argv[0] not in SHARED:
        raise ConfigError(f"torchrun: must start one of {', '.join(SHARED)}, got {argv[:1]}")
    from advbayes.distributed import joined

    with joined() as ranks, ExitStack() as stack:
        if not ranks.is_first:
            warnings.simplefilter("ignore")
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(silence))
        yield


def memory_wanted(error: BaseException) -> str | None:
    """What an allocation that failed had asked for; None for another error.

    >>> memory_wanted(
    ...     RuntimeError(
    ...         "can't allocate memory: you tried to allocate 8000000000 bytes. Error code 12"
    ...     )
    ... )
    'wanted 8.00 GB at once'
    >>> memory_wanted(MemoryError()), memory_wanted(RuntimeError("shapes differ"))
    ('wanted more than there is', None)
    """
    text = str(error)
    if match := re.search(r"tried to allocate (\d+) bytes", text):
        return f"wanted {int(match[1]) / 1e9:.2f} GB at once"
    if isinstance(error, MemoryError):  # numpy says how much, and for which shape
        return text[:1].lower() + text[1:] if text else "wanted more than there is"
    if "Storage size calculation overflowed" in text:
        return f"wanted more than can be counted ({text.partition('with ')[2]})"
    return None


def is_mistake(error: BaseException) -> bool:
    """Whether the message is for the user: what this package refuses, what the system says of a
    file, and an extra that is not installed. All else is a bug, also of the same built-in types.

    >>> from advbayes.runs.config import ConfigError
    >>> is_mistake(ConfigError("lr: must be a number > 0")), is_mistake(ValueError("lr"))
    (True, False)
    """
    if isinstance(error, ModuleNotFoundError):  # a part of ours that is missing is a bug
        return not (error.name or "").startswith("advbayes")
    return isinstance(error, (AdvBayesError, OSError))
