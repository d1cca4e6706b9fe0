"""How the tests run command lines: in new interpreters, and in forks of warm ones."""

import contextlib

import psutil
import pytest

from tests.support.command_lines import environment, kill
from tests.support.warm_python import WarmPython


def test_failing_command_fails_the_test_and_shows_its_output(run_cli):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)exit status 3.*--- stdout\nout\n.*bad"):
        run_cli("python", "-c", "import sys; print('out'); print('bad', file=sys.stderr); exit(3)")


@pytest.fixture(scope="module")
def warm():
    python = WarmPython(["colorsys"], environment())
    yield python
    python.close()


def test_variables_that_imports_read_need_a_new_interpreter(warm):
    assert warm.suits({**environment(), "SPY_LOG": "x"})
    assert not warm.suits({**environment(), "HF_HOME": "x"})


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
    """Exit functions are called, and its exit status is returned."""
    code = (
        "import atexit, os, sys; atexit.register(print, 'end'); "
        "print(__name__, sys.argv[1:], os.getcwd(), input(), os.environ['A']); sys.exit(7)"
    )
    status, out, err, late = run(code, "-x", "y z", input="text\n", A="b")
    assert (status, err, late) == (7, "", False)
    assert out == f"__main__ ['-x', 'y z'] {tmp_path} text b\nend\n"


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
    status, out, _, late = run(code, timeout=1.0)
    assert late
    assert status < 0
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(out)).wait(10)  # raises TimeoutExpired if it lives on
