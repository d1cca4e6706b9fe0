"""Every program of the repository explains itself, as a module and, where it is one, as a file."""

import argparse
import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.programs import module_of, parsers_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("recipes", "hf_models", "fairseq_user_dir", "cape_plugins", "benchmarks")
START = 'if __name__ == "__main__":'
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if START in path.read_text(encoding="utf-8") or path.name == "__main__.py"
)


def help_of(run, target, monkeypatch, **more):
    """What `run` prints as a new interpreter would with --help, and its exit status."""
    monkeypatch.setattr(sys, "argv", [target, "--help"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        run(target, run_name="__main__", **more)
    return output.getvalue(), ended.value.code or 0


# commands that are installed as a script, and the names of the scripts
COMMANDS = {"cape_plugins": "cape-plugins", "fairseq_user_dir.average": "cape-average-checkpoints"}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("path", PROGRAMS)
def test_program_explains_itself_and_is_named_as_it_was_typed(path, monkeypatch):
    if re.search(r"^hf_models|finetune_hf|recipes/(vit/evaluate|asr/whisper)\.py", path):
        pytest.importorskip("transformers")
    module = module_of(path)
    text, status = help_of(runpy.run_module, module, monkeypatch, alter_sys=True)
    assert status == 0
    assert text.startswith(f"usage: {COMMANDS.get(module, f'python -m {module}')} ")
    if path.startswith("recipes/"):
        # a file has its own folder first on the path, as `python recipes/mt/run.py` has
        monkeypatch.syspath_prepend(str((ROOT / path).parent))
        other, status = help_of(runpy.run_path, str(ROOT / path), monkeypatch)
        assert status == 0
        # argparse breaks the line after the name of a program where the checkout lies deep
        named = f"usage: python {shlex.quote(str(ROOT / path))} "
        assert " ".join(other.split()).startswith(named)
        # all but the name of the program
        assert other.partition("\n\n")[2] == text.partition("\n\n")[2] != ""


@pytest.fixture(scope="module")
def parsers():
    pytest.importorskip("transformers")
    pytest.importorskip("fairseq")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [parsers_of(path, patch) for path in PROGRAMS]
    return {name: parser for named in every for name, parser in named.items()}


def test_mistakes_are_one_line_in_every_program(parsers, capsys):
    assert len(parsers) > 25
    for name, parser in parsers.items():
        with pytest.raises(SystemExit, match="2"):
            parser.error("argument --x: 'y' is\nnot allowed")
        line = f"error: argument --x: 'y' is not allowed; see {parser.prog} --help\n"
        assert capsys.readouterr().err == line, name
        assert not parser.allow_abbrev, name


def test_a_seed_that_is_given_twice_is_no_second_seed(parsers):
    seed_options = (parser._option_string_actions.get("--seeds") for parser in parsers.values())
    actions = list(filter(None, seed_options))
    assert len(actions) > 2
    for action in actions:
        with pytest.raises(argparse.ArgumentError) as error:
            action(None, argparse.Namespace(), [1, 2, 1])
        assert str(error.value) == "argument --seeds: 1 2 1: give each value once"


COMMAND = re.compile(
    r"\b(python3? (?:-m )?(?:recipes|hf_models|cape_plugins|fairseq_user_dir|benchmarks)[\w./]*"
    r"|accelerate launch recipes[\w./]*|cape-plugins|cape-average-checkpoints)( [^`|;&\n]*)"
)
# other scripts spell theirs with underscores
OPTION = re.compile(r"(?<= )--[a-z][a-z-]*(?=[ =]|$)")
INSTALLED = {command: module for module, command in COMMANDS.items()}
OF_HOSTS = {"--bf16", "--seed"}  # TrainingArguments and fairseq-train


def commands_of(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for start, rest in COMMAND.findall(text):
        target = start.split()[-1]
        name = INSTALLED.get(target) or module_of(target)
        yield name, rest.split(" -- ")[0]


def test_options_of_the_commands_in_the_documents_exist(parsers):
    """An option that was renamed has to follow in every command that a page shows."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/*.md")]
    checked, unknown = 0, []
    for page in pages:
        for name, words in commands_of(page):
            for word in words.split():  # a subcommand has its own parser
                name = f"{name} {word}" if f"{name} {word}" in parsers else name
            options = set(OPTION.findall(words)) - OF_HOSTS
            if name in parsers:  # hf_models.run hands all options to the script of the user
                checked += len(options)
                missing = options - set(parsers[name]._option_string_actions)
                unknown += [(page.name, name, option) for option in missing]
    assert unknown == []
    assert checked > 200
