"""Child processes with progress, and *steps*, which are done once. A step makes one folder. The
folder gets its name only when it is complete, and holds a record of the settings. A finished step
is reused, a half-finished step is done again, and a step with other settings is an error."""

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cape_plugins.utils.files import writing

RECORD = "settings.json"


class CommandError(ValueError):
    """A mistake of the user; the message names option, value and remedy."""


class ChildError(RuntimeError):
    """A started command failed; the message has the end of its log."""


def run_main(main: Callable[[], None], interrupted: str = "") -> None:
    """Runs the `main` of a program. Errors of the program are shown without traceback; the exit
    status is 2 for a mistake of the user, and 1 if a started command fails. SIGTERM and Ctrl-C end
    the program and its child processes; Ctrl-C shows the line `interrupted`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return main()
    except CommandError as error:
        # in a worker process of torch the message has its traceback before it
        status, message = 2, str(error).rpartition(f"{CommandError.__name__}: ")[2].strip()
    except (NotADirectoryError, FileExistsError) as error:  # --work or --output
        status, message = 2, f"{error.filename}: a file is where a folder is needed"
    except ChildError as error:
        status, message = 1, str(error)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def started_as() -> str:
    """How this process was started, without options: ``python SCRIPT`` or ``python -m MODULE``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return f"python {shlex.quote(sys.argv[0])}"
    return f"python -m {spec.name.removesuffix('.__main__')}"  # of a package


def folder_name(name: str) -> str:
    """The name, with hyphens in place of spaces, colons and similar characters."""
    return re.sub(r"[^\w.+()]", "-", name)


def progress(work: Iterable | None = None, title: str = "", **options: Any) -> tqdm:
    """A progress bar; if the output goes to a file, a line from time to time."""
    if sys.stderr.isatty():
        return tqdm(work, title, leave=False, disable=None, **options)
    seldom = {"delay": 10, "mininterval": 30}  # seconds
    # io.StringIO, because tqdm writes control characters to a file, also when it closes
    return _ProgressLines(work, title, leave=False, file=io.StringIO(), **{**options, **seldom})


class _ProgressLines(tqdm):
    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Writes a new line; tqdm would overwrite its last line."""
        if msg is None:  # msg is empty at the end
            print(self, file=sys.stderr, flush=True)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes text lines in one step: an interrupted program leaves no partial file."""
    with writing(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def read_written(path: Path) -> list[str]:
    """The lines of a file that :func:`write_lines` has written. Only a line feed ends a line;
    reading as text would also end lines at carriage returns."""
    return path.read_bytes().decode("utf-8").split("\n")[:-1]


def digest(path: Path) -> str:
    """A short fingerprint of the content of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()[:16]


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yields a new temporary folder, which is renamed to `folder` when the block ends without an
    error. Otherwise the temporary folder is deleted, unless a command failed and left its log in
    the folder."""
    partial = folder.with_name(f"{folder.name}.partial")
    new_parents = [parent for parent in partial.parents if not parent.exists()]
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except ChildError:
        raise
    except BaseException:  # also Ctrl-C
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            # another process has written to the folder meanwhile
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    os.replace(partial, folder)


# for programs whose folders of finished work are beside their results
OTHER_OUTPUT = "give another --output folder"


def matches(
    folder: Path, settings: Mapping[str, Any], remedy: str = "give another --work folder"
) -> bool:
    """Whether `folder` was made with these `settings`: False if it does not exist; other settings
    raise CommandError."""
    if not (folder / RECORD).exists():
        return False
    old, new = recorded(folder), _plain(settings)
    if old == new:
        return True
    values = ((key, old.get(key), new.get(key)) for key in sorted({*old, *new}))
    changes = "; ".join(_change(key, then, now) for key, then, now in values if then != now)
    raise CommandError(
        f"{folder} was made with other settings ({changes}); {remedy}, or delete this folder to "
        "have it made again"
    )


# the settings in the form of a record that was read
def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(settings, default=str))


def _change(key: str, old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        old, new = _flags(old), _flags(new)
        gone = " ".join(flag for flag in old if flag not in new)
        added = " ".join(flag for flag in new if flag not in old)
        if bool(gone) != bool(added):
            return f"{key}: {f'now also {added}' if added else f'no longer {gone}'}"
        # the same flags in another order
        return f"{key} {gone or ' '.join(old)}, now {added or ' '.join(new)}"
    if isinstance(old, dict) and isinstance(new, dict):
        changed = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
        old, new = ({k: d.get(k) for k in changed} for d in (old, new))
    return f"{key} {old!r}, now {new!r}"


def _flags(words: Sequence[Any]) -> list[str]:
    """Options joined with their values; other lists word by word.

    >>> _flags(["--lr", "0.1", "--cpu", "--seed", "7", 3])
    ['--lr 0.1', '--cpu', '--seed 7', '3']
    """
    groups: list[str] = []
    for word in words:
        is_value = isinstance(word, str) and not word.startswith("--")
        if is_value and groups and groups[-1].startswith("--"):
            word = f"{groups.pop()} {word}"
        groups.append(str(word))
    return groups


def recorded(folder: Path) -> dict[str, Any]:
    """The settings that `folder` was made with; empty if it does not exist."""
    path = folder / RECORD
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def record(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes down the settings that `folder` is made with."""
    with writing(folder / RECORD) as file:
        json.dump(_plain(settings), file, indent=1, sort_keys=True)


def step(
    folder: Path,
    settings: Mapping[str, Any],
    make: Callable[[Path], None],
    remedy: str = "give another --work folder",
) -> Path:
    """Makes `folder` with ``make(temporary folder)``, unless the folder is finished; returns
    `folder`. For `remedy` see :func:`matches`."""
    if not matches(folder, settings, remedy):
        shutil.rmtree(folder, ignore_errors=True)
        with building(folder) as partial:
            make(partial)
            record(partial, settings)
    return folder


_children: set[subprocess.Popen] = set()


def stop_children() -> None:
    """Kills the processes of :func:`run_module` in other threads, where the call then raises."""
    for process in tuple(_children):
        process.kill()


def run_module(
    module: str,
    *args: object,
    log: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Runs ``python -m module args`` with this interpreter; its output is added to the file `log`,
    and `on_line` sees each line as it comes. A failure raises ChildError."""
    command = [sys.executable, "-m", module, *map(str, args)]
    tail: deque[str] = deque(maxlen=25)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "a", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})},
        ) as process,
    ):
        _children.add(process)
        try:
            for line in process.stdout:
                file.write(line)
                tail.append(line)
                if on_line:
                    on_line(line)
        except BaseException:  # also Ctrl-C: leave no orphan behind
            process.kill()
            raise
        finally:
            process.wait()
            _children.discard(process)
    if process.returncode:
        raise ChildError(
            f"{' '.join(command)}\nfailed with exit status {process.returncode}; full log in {log};"
            f" its end:\n{''.join(tail)}"
        )
