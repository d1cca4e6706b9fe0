"""Proves that ``--user-dir`` finds both packages: by bare name, relative and absolute path, from
the repository and from elsewhere, installed beside fairseq, and after they have been imported."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.fairseq_models import ROOT, generate_words, lines, train_words

pytestmark = pytest.mark.slow

PACKAGES = ("cape_plugins", "fairseq_user_dir")
# Folder, --user-dir, what is imported before, and whether both are installed beside fairseq.
# {name} is the package, {root} the repository, {elsewhere} another folder.
RESOLVED = {
    "bare name in the repository": ("{root}", "{name}", None, False),
    "relative": ("{root}", "./{name}", None, False),
    "trailing slash": ("{root}", "{name}/", None, False),
    "from a folder of the repository": ("{root}/tests", "../{name}", None, False),
    "absolute in the repository": ("{root}", "{root}/{name}", None, False),
    "absolute elsewhere": ("{elsewhere}", "{root}/{name}", None, False),
    "relative elsewhere": ("{elsewhere}", "{relative}/{name}", None, False),
    "installed": ("{elsewhere}", "{name}", None, True),
    "installed and in the repository": ("{root}", "{name}", None, True),
    "imported, absolute": ("{elsewhere}", "{root}/{name}", "fairseq_user_dir", False),
    "imported, bare name": ("{root}", "{name}", "fairseq_user_dir", False),
    "imported, installed": ("{elsewhere}", "{name}", "fairseq_user_dir", True),
    "imported, no user dir": ("{elsewhere}", None, "fairseq_user_dir", False),
}
NOT_RESOLVED = {
    "core imported, no hook": ("{elsewhere}", None, "cape_plugins", False),
    "no user dir": ("{root}", None, None, False),
    "bare name elsewhere": ("{elsewhere}", "{name}", None, False),
}
# Imports fairseq once; each case then runs in a fork, because a process imports a package once.
PROGRAM = """
import argparse, importlib, json, os, sys
from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY
assert not {"cape_plugins", "fairseq_user_dir"} & set(sys.modules)

def case(folder, user_dir, imported, search):
    os.chdir(folder)
    sys.path[:0] = search
    if imported:
        importlib.import_module(imported)
    if user_dir is not None:
        for _ in range(2):  # commands import it when they parse, and again when they run
            utils.import_user_module(argparse.Namespace(user_dir=user_dir))
    return "found" if "cape_transformer_tiny" in ARCH_MODEL_REGISTRY else "not registered"

for name, arguments in json.load(sys.stdin).items():
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            result = case(*arguments)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print("RESULT", json.dumps([name, result]), flush=True)
        os._exit(0)
    os.wait()
"""


def make_site(folder: Path, packages: bool) -> Path:
    """A site-packages folder with fairseq in it, and perhaps the packages, as pip would lay it."""
    import fairseq

    (folder / "fairseq").mkdir(parents=True)
    for item in Path(fairseq.__file__).parent.iterdir():
        (folder / "fairseq" / item.name).symlink_to(item)
    for name in PACKAGES if packages else ():
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def resolve(run_cli, tmp_path_factory):
    """{case: "found" or the error}, for all cases of both packages."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    sites = {
        installed: make_site(tmp_path_factory.mktemp("site") / "site-packages", installed)
        for installed in (True, False)
    }
    results = {}
    for installed, site in sites.items():
        cases = {}
        for package in PACKAGES:
            relative = os.path.relpath(ROOT, elsewhere)
            places = {"name": package, "root": ROOT, "elsewhere": elsewhere, "relative": relative}
            for case, (folder, user_dir, imported, beside) in (RESOLVED | NOT_RESOLVED).items():
                if beside == installed:
                    search = [str(ROOT)] if imported and not beside else []
                    path = user_dir and user_dir.format(**places)
                    cases[f"{package}: {case}"] = (folder.format(**places), path, imported, search)
        # the repository is not on the path, so that it must be results_of_site
        environment = {"PYTHONPATH": str(site)}
        words = ["python", "-c", PROGRAM]
        output = run_cli(*words, input=json.dumps(cases), cwd=elsewhere, env=environment).stdout
        results_of_site = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
        results.update(json.loads(pair) for pair in results_of_site)
    return results


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("case", RESOLVED)
def test_user_dir_is_found(case, package, resolve):
    assert resolve[f"{package}: {case}"] == "found"


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("case", NOT_RESOLVED)
def test_user_dir_that_fairseq_cannot_find_is_not_found(case, package, resolve):
    """The table can tell: these must fail, by the rules of fairseq."""
    result = resolve[f"{package}: {case}"]
    assert result != "found"
    assert result == "not registered" or result.startswith("FileNotFoundError")


@pytest.mark.parametrize("package", PACKAGES)
def test_real_commands_from_the_repository_and_from_elsewhere(
    package, run_cli, corpus, test_data, tmp_path
):
    """The commands find the package by themselves: nothing else makes it importable."""
    environment = {"PYTHONPATH": ""}
    words = train_words(corpus.binary, tmp_path, "--user-dir", package, updates=1)
    run_cli(*words, cwd=ROOT, env=environment)
    checkpoint = tmp_path / "checkpoint_last.pt"
    words = generate_words(test_data, checkpoint, "--user-dir", ROOT / package)
    output = run_cli(*words, cwd=tmp_path, env=environment).stdout
    assert len(lines(output, "H")) == 24
