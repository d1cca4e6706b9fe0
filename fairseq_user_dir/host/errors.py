"""Shows users' mistakes in settings, data and checkpoints as errors of one line in fairseq's
commands.

In Python such mistakes are ValueErrors that a module of this project raises, or errors that fairseq
raises with a reason. A command prints the message in one line and ends with status 1. Every other
error keeps its traceback, because the error may be a fault of the program.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import fairseq
from hydra.errors import CompactHydraException
from torch.multiprocessing import ProcessRaisedException

import cape_plugins
from cape_plugins.settings.arguments import PREFIX, text_in_flags

_PROJECT_FOLDERS = (Path(cape_plugins.__file__).parent, Path(__file__).parents[1])
_FAIRSEQ = Path(fairseq.__file__).parent

# Beginnings of fairseq's error messages, and remedies that this module adds to the messages.
_REMEDIES = {
    "Dataset not found": "give --gen-subset, --valid-subset or --train-subset the name of a set in "
    "the data folder, such as test",
    "Model file not found": "check the path in --path",
    "Could not infer language pair": "give --source-lang and --target-lang or, for data of another "
    "kind, the --task of the checkpoint (cape_asr for speech)",
    "Size of sample": "or raise --max-source-positions and --max-target-positions, if the model "
    "has no limit",
    "No module named": "install it with pip, or do without the option that needs it",
    "--share-": "make the data by fairseq-preprocess --joined-dictionary, or leave the flag out",
}


class SettingsError(ValueError, CompactHydraException):
    """A user's mistake, with a complete message: option, value, allowed values and remedy. The base
    class CompactHydraException makes hydra print the message alone, without a traceback."""


@contextmanager
def named_by_flags(beginning: str = "", prefix: str = PREFIX) -> Iterator[None]:
    """Turns a ValueError of :mod:`cape_plugins` into a SettingsError that names options as flags.

    Args:
        beginning: Beginning of the message, such as a file.
        prefix: Prefix of the flags.
    """
    try:
        yield
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(beginning + text_in_flags(error, prefix)) from error


def print_without_traceback() -> None:
    """Makes fairseq's commands print a SettingsError in one line; a second call changes nothing.

    Uses ``sys.excepthook``, because the command already runs when it imports its user directory,
    and cannot be wrapped.
    """
    if hasattr(sys.excepthook, "other"):
        return
    previous_hook = sys.excepthook

    def hook(error_type: type, error: BaseException, trace: TracebackType | None) -> None:
        message = _message(error, trace) if _in_command(trace) else None
        if message is None:
            previous_hook(error_type, error, trace)
        else:
            print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)

    hook.other = previous_hook
    sys.excepthook = hook


def _message(error: BaseException, trace: TracebackType | None) -> str | None:
    """The message in one line; None for errors that keep their traceback."""
    if isinstance(error, SettingsError):
        message = str(error)
    elif isinstance(error, ValueError) and _raised_here(trace):
        message = text_in_flags(error)
    elif _refused_by_fairseq(error, trace):
        message = str(error)
        remedies = (remedy for start, remedy in _REMEDIES.items() if message.startswith(start))
        message = "; ".join([message, *remedies])
    elif isinstance(error, ProcessRaisedException):
        # a process of a training on several GPUs raised the error, at the end of its traceback
        name = f"{SettingsError.__module__}.{SettingsError.__qualname__}: "
        _, mark, message = str(error).rpartition(name)
        if not mark:
            return None
    else:
        return None
    return " ".join(message.split())


def _in_command(trace: TracebackType | None) -> bool:
    """Whether a command of fairseq raised the error, not a program that uses parts of fairseq."""
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).parent.name == "fairseq_cli":
            return True
        trace = trace.tb_next
    return False


def _end(trace: TracebackType | None) -> tuple[Path, int]:
    """File and line that raised the error."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return Path(), 0
    return Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno


def _statement(file: Path, line: int) -> type[ast.AST]:
    """Kind of the innermost statement to which a line belongs. The line need not be the first line
    of the statement: Python reports the line of the condition of a long ``assert``."""
    statement: type[ast.AST] = ast.Module
    for node in ast.walk(ast.parse("".join(linecache.getlines(str(file))))):  # outer nodes first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            statement = type(node)
    return statement


def _raised_here(trace: TracebackType | None) -> bool:
    """Whether a module of this project raised the error, not torch or numpy below the module."""
    folders = _end(trace)[0].parents
    return any(folder in folders for folder in _PROJECT_FOLDERS)


def _refused_by_fairseq(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether fairseq reports a mistake of the user: by a ``raise`` or ``assert`` with a message,
    or by an error about a missing file or package. fairseq's commands use ``assert`` with the names
    of flags to check that settings fit together."""
    file, line = _end(trace)
    command = file.parent.name == "fairseq_cli"
    if not str(error) or not (command or _FAIRSEQ in file.parents):
        return False
    if isinstance(error, FileNotFoundError | ModuleNotFoundError):
        return True
    if isinstance(error, AssertionError):
        return (command or "--" in str(error)) and _statement(file, line) is ast.Assert
    plain = type(error) is Exception or isinstance(error, ValueError | OSError | ImportError)
    return plain and _statement(file, line) is ast.Raise
