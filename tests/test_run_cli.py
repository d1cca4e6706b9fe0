"""How the tests run command lines: in new interpreters, and in forks of warm ones."""

import contextlib
import subprocess

import psutil
import pytest

from tests.support.command_lines import environment, kill
from tests.support.warm_python import FAIRSEQ, TRANSFORMERS, WarmPython, imports_of


def test_failing_command_fails_the_test_and_shows_its_output(run_cli):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)exit status 3.*--- stdout\nout\n.*bad"):
        run_cli("python", "-c", "import sys; print('out'); print('bad', file=sys.stderr); exit(3)")


def test_failing_command_is_returned_without_check(run_cli):
    assert run_cli("python", "-c", "exit(3)", check=False).returncode == 3


def test_command_that_takes_too_long_fails_the_test(run_cli):
    with pytest.raises(pytest.fail.Exception, match=r"still running after 0\.5 s"):
        run_cli("python", "-c", "import time; time.sleep(60)", timeout=0.5)


def test_command_reads_its_input(run_cli):
    assert run_cli("python", "-c", "print(input())", input="text\n").stdout == "text\n"


# ---- warm interpreters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        ("fairseq-train data --arch x", FAIRSEQ),
        ("python -m fairseq_cli.generate data", FAIRSEQ),
        ("python -m fairseq_user_dir.average", FAIRSEQ),
        ("python -m hf_models.convert a b", TRANSFORMERS),
        ("python recipes/mt/finetune_hf.py", TRANSFORMERS),
        ("python -m recipes.vit.evaluate", TRANSFORMERS),
        ("fairseq-hydra-train task=x", ()),
        ("python -c code", ()),
        ("python -m cape_plugins flags", ()),
        ("cape-plugins flags", ()),
        ("accelerate launch recipes/mt/finetune_hf.py", ()),
    ],
)
def test_commands_of_a_host_are_warm(command, modules):
    assert imports_of(command.split()) == modules


@pytest.fixture(scope="module")
def warm():
    python = WarmPython(["colorsys"], environment())
    yield python
    python.close()


@pytest.mark.parametrize("name", ["PYTHONPATH", "HF_HOME", "TRANSFORMERS_OFFLINE"])
def test_variables_that_imports_read_need_a_new_interpreter(name, warm):
    assert warm.suits({**environment(), "SPY_LOG": "x"})
    assert not warm.suits({**environment(), name: "x"})


@pytest.fixture
def run(warm, tmp_path):
    """Function that runs a script in the warm interpreter: exit status, stdout, stderr, late."""

    def run(code, *words, input=None, timeout=60.0, **env):
        script = tmp_path / "script.py"
        script.write_text(code)
        environ = {**environment(), **env}
        return warm.run(["python", str(script), *words], tmp_path, environ, input, timeout, kill)

    return run


def test_script_has_arguments_folder_input_and_variables(run, tmp_path):
    code = "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), input(), os.environ['A'])"
    status, out, err, late = run(code, "-x", "y z", input="text\n", A="b")
    assert (status, err, late) == (0, "", False)
    assert out == f"__main__ ['-x', 'y z'] {tmp_path} text b\n"


def test_exit_status_is_that_of_the_script(run):
    assert run("raise SystemExit(7)")[0] == 7


def test_error_ends_the_script_through_its_own_hook(run):
    code = "import sys; sys.excepthook = lambda *error: print('hook', error[1]); 1 / 0"
    assert run(code)[:2] == (1, "hook division by zero\n")


def test_traceback_goes_to_stderr(run):
    assert run("1 / 0")[2].endswith("ZeroDivisionError: division by zero\n")


def test_exit_functions_are_called(run):
    assert run("import atexit; atexit.register(print, 'end'); print('start')")[1] == "start\nend\n"


def test_modules_are_there_and_no_change_reaches_the_next_script(run):
    code = "import sys; print('colorsys' in sys.modules, hasattr(sys.modules['colorsys'], 'new'))"
    change = f"{code}; import colorsys; colorsys.new = 1"
    assert run(change)[1] == run(code)[1] == "True False\n"


@pytest.mark.slow
def test_late_script_is_killed_with_its_children(run, tmp_path):
    code = (
        "import subprocess, sys, time; wait = [sys.executable, '-c', 'import time; time.sleep(60)']"
        "; print(subprocess.Popen(wait).pid, flush=True); time.sleep(60)"
    )
    status, out, _, late = run(code, timeout=3.0)
    assert late
    assert status < 0
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(out)).wait(10)  # raises TimeoutExpired if it lives on


@pytest.mark.slow
def test_console_script_says_the_same_as_in_a_new_interpreter(warm, run_cli, tmp_path):
    words = ["cape-plugins", "plot", "no-such-picture"]
    new = run_cli(*words, cwd=tmp_path, check=False, fresh=True)
    assert new.returncode == 2
    expected = (2, new.stdout, new.stderr, False)
    assert warm.run(words, tmp_path, environment(), None, 60.0, kill) == expected


@pytest.mark.slow
def test_module_says_the_same_as_in_a_new_interpreter(warm, run_cli, tmp_path):
    words = ["python", "-m", "cape_plugins", "user-dir"]
    new = run_cli(*words, cwd=tmp_path, fresh=True)
    assert warm.run(words, tmp_path, environment(), None, 60.0, kill) == (
        0,
        new.stdout,
        new.stderr,
        False,
    )


def test_interpreter_that_cannot_import_is_an_error():
    with pytest.raises(RuntimeError, match="no_such_module did not start"):
        WarmPython(["no_such_module"], environment())


# ---- children of a command ---------------------------------------------------------------------

STARTS = """
import subprocess, sys
words = [sys.executable, "-m", sys.argv[1], "--help"]
done = subprocess.run(words, capture_output=True, text=True, input="text")
print(done.returncode, "fork" if "fairseq" in done.stderr else "new", done.stdout.strip())
"""
SAYS = """
import sys
print("words", sys.argv[1:], input())
print("fairseq" if "fairseq.trainer" in sys.modules else "", file=sys.stderr)
sys.exit(3)
"""


def write_module(folder, name, source):
    """One that goes for a command of fairseq, in a folder from which commands are run."""
    (folder / "fairseq_user_dir").mkdir()
    (folder / "fairseq_user_dir" / "__init__.py").touch()
    (folder / "fairseq_user_dir" / f"{name}.py").write_text(source)


@pytest.mark.slow
def test_children_of_fairseq_are_forks_and_others_are_not(run_cli, tmp_path):
    """Each has its own words, input, output and exit status."""
    write_module(tmp_path, "says", SAYS)
    (tmp_path / "other.py").write_text(SAYS)
    for module, how in (("fairseq_user_dir.says", "fork"), ("other", "new")):
        words = ("python", "-c", STARTS, module)
        done = run_cli(*words, cwd=tmp_path, warm_children=True)
        assert done.stdout == f"3 {how} words ['--help'] text\n"


def test_child_ends_with_its_client(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    write_module(tmp_path, "waits", code)
    python = WarmPython(["json"], environment())
    try:
        words = [python.client(), "-m", "fairseq_user_dir.waits"]
        with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as client:
            child = psutil.Process(int(client.stdout.readline()))
            client.kill()
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()
    finally:
        python.close()
