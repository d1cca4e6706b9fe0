"""Interpreters that have imported a host already and fork for each command line of a test.

Imports take two thirds of the time of a small command. A warm interpreter imports the modules once;
a command is then a separate process that runs from its first line to its exit status as ``python
-m MODULE``, ``python SCRIPT`` or the console script does. Only third-party modules are imported
beforehand, and only the ones that such a command imports in any case: each command imports the
modules of this repository anew.

    python tests/support/warm_python.py SOCKET MODULE...      the interpreter, started by WarmPython

A recipe starts fairseq's commands with its `sys.executable`. :meth:`WarmPython.client` is a program
that takes the place of this interpreter: it has such a command run in a fork, too, and lends it its
input and output.
"""

import contextlib
import gc
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

FAIRSEQ = ("fairseq", "fairseq.checkpoint_utils", "fairseq.options", "fairseq.trainer")
TRANSFORMERS = ("transformers", "transformers.modeling_utils", "transformers.trainer", "accelerate")


CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

words = sys.argv[1:]
threads = os.environ.get("OMP_NUM_THREADS")
if words[:1] != ["-m"] or not words[1].startswith(("fairseq_cli.", "fairseq_user_dir.")):
    os.execv({python!r}, [{python!r}, *words])
if threads != {threads!r}:
    sys.exit(f"warm interpreters have OMP_NUM_THREADS={threads}, not {{threads}}")
files = [f"/proc/{{os.getpid()}}/fd/{{number}}" for number in range(3)]
request = {{"words": ["python", *words], "cwd": os.getcwd(), "files": files}}
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    answers = connection.makefile()
    connection.sendall((json.dumps({{**request, "env": dict(os.environ)}}) + "\\n").encode())
    answers.readline()
    status = int(answers.readline())
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
READ_BY_IMPORTS = ("PYTHON", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "MPL")  # variables


def imports_of(words: Sequence[str]) -> tuple[str, ...]:
    """The modules that a warm interpreter for this command has imported; none for a command that
    has to be started in a new one."""
    command, *rest = words
    if command.startswith("fairseq-") and command != "fairseq-hydra-train":
        return FAIRSEQ
    if command != "python" or not rest:
        return ()
    module = rest[1] if rest[0] == "-m" else rest[0].removesuffix(".py").replace("/", ".")
    if module.startswith(("fairseq_cli.", "fairseq_user_dir.")):
        return FAIRSEQ
    if module.startswith("hf_models.") or module.endswith((".finetune_hf", ".vit.evaluate")):
        return TRANSFORMERS
    return ()


def _read_by_imports(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_BY_IMPORTS)}


# ---- the side of the tests ---------------------------------------------------------------------


class WarmPython:
    """A warm interpreter; :meth:`run` runs one command in a fork of it.

    Args:
        modules: What it imports beforehand.
        env: Its environment; each command has its own.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self.imported_with = _read_by_imports(env)
        self.folder = tempfile.mkdtemp(prefix="warm-python-")
        command = [sys.executable, __file__, self.address, *modules]
        self.process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)} did not start")

    @property
    def address(self) -> str:
        return os.path.join(self.folder, "socket")

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether the modules would be imported alike in this environment."""
        return _read_by_imports(env) == self.imported_with

    def client(self) -> Path:
        """A program that runs ``-m MODULE`` of fairseq here and all else in a new interpreter. A
        command ends with its client."""
        path = Path(self.folder, "python")
        if not path.exists():
            threads = self.imported_with.get("OMP_NUM_THREADS")
            text = CLIENT.format(python=sys.executable, address=self.address, threads=threads)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o700)
        return path

    def run(
        self,
        words: Sequence[str],
        cwd: Path | None,
        env: Mapping[str, str],
        input: str | None,
        timeout: float,
        kill: Callable[[int], None],
    ) -> tuple[int, str, str, bool]:
        """Exit status, stdout, stderr, and whether the time was over and ``kill(pid)`` called."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            files = [os.path.join(folder, name) for name in ("in", "out", "err")]
            with open(files[0], "w", encoding="utf-8") as file:
                file.write(input or "")
            request = {"words": list(words), "cwd": str(cwd or os.getcwd()), "files": files}
            request["env"] = dict(env)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self.address)
                answers = connection.makefile()
                connection.sendall((json.dumps(request) + "\n").encode())
                pid, late = int(answers.readline()), False
                try:
                    if not select.select([connection], [], [], timeout)[0]:
                        late = True
                        kill(pid)
                except BaseException:
                    kill(pid)
                    raise
                status = int(answers.readline())
            out, err = (Path(file).read_text(encoding="utf-8") for file in files[1:])
            return status, out, err, late

    def close(self) -> None:
        """End the interpreter; commands that still run are left alone."""
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- the side of the interpreter ---------------------------------------------------------------


def next_command(address: str) -> list[str]:
    """Waits for commands. Returns in a new process for each of them, with its words."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
                os._exit(0)  # the tests are over
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection:
        request = json.loads(connection.makefile().readline())
        if pid := os.fork():
            with contextlib.suppress(BrokenPipeError):  # whoever asked may have ended already
                connection.sendall(f"{pid}\n".encode())
            ended = os.pidfd_open(pid)
            if ended not in select.select([connection, ended], [], [])[0]:
                os.kill(pid, signal.SIGKILL)  # nobody waits for it any more
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(f"{status}\n".encode())
            os._exit(0)
    os.setsid()  # so that it can be killed with all its workers
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, path in enumerate(request["files"]):
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(path, mode, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    return request["words"]


def become(words: Sequence[str]) -> None:
    """Runs a command as a new interpreter would."""
    command, *rest = words
    if command == "fairseq-train" or rest[:2] == ["-m", "fairseq_cli.train"]:
        # it alone sets up the root logger before it imports fairseq, which does so otherwise
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
    if command != "python":
        script = Path(sys.executable).parent / command
        sys.argv, sys.path[0] = [str(script), *rest], str(script.parent)
        (entry,) = entry_points(group="console_scripts", name=command)
        sys.exit(entry.load()())
    if rest[0] == "-m":
        sys.argv, sys.path[0] = rest[1:], os.getcwd()
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = rest, str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[2:]:
        import_module(module)
    gc.collect()
    gc.freeze()  # memory stays shared with the forks
    become(next_command(sys.argv[1]))
