"""Every program of the repository explains itself, as a module and, where it is one, as a file, and
all have one vocabulary."""

import argparse
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections import defaultdict
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


def test_programs_are_seen():
    assert {"recipes/mt/run.py", "hf_models/convert.py", "cape_plugins/__main__.py"} <= {*PROGRAMS}
    assert len(PROGRAMS) > 15


def help_of(run, target, monkeypatch, **more):
    """What `run` prints as a new interpreter would with --help, and its exit status."""
    monkeypatch.setattr(sys, "argv", [target, "--help"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        run(target, run_name="__main__", **more)
    return output.getvalue(), ended.value.code or 0


def skip_without_host(path):
    others = ("recipes/vit/evaluate.py", "recipes/asr/whisper.py")
    if path.startswith("hf_models") or "finetune_hf" in path or path in others:
        pytest.importorskip("transformers")


# those that are installed under a name of their own
COMMANDS = {
    "cape_plugins": "cape-plugins",
    "fairseq_user_dir.average": "cape-average-checkpoints",
}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("path", PROGRAMS)
def test_program_explains_itself_and_is_named_as_it_was_typed(path, monkeypatch):
    skip_without_host(path)
    module = module_of(path)
    text, status = help_of(runpy.run_module, module, monkeypatch, alter_sys=True)
    assert status == 0
    assert text.startswith(f"usage: {COMMANDS.get(module, f'python -m {module}')} ")
    if path.startswith("recipes/"):
        # a file has its own folder first on the path, as `python recipes/mt/run.py` has
        monkeypatch.syspath_prepend(str((ROOT / path).parent))
        other, status = help_of(runpy.run_path, str(ROOT / path), monkeypatch)
        assert status == 0
        assert other.startswith(f"usage: python {shlex.quote(str(ROOT / path))} ")
        # all but the name of the program
        assert other.partition("\n\n")[2] == text.partition("\n\n")[2] != ""


# ---- one vocabulary ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parsers():
    pytest.importorskip("transformers")
    pytest.importorskip("fairseq")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [parsers_of(path, patch) for path in PROGRAMS]
    return {name: parser for named in every for name, parser in named.items()}


@pytest.fixture(scope="module")
def actions(parsers):
    """``{option: {program: what argparse knows of it}}``."""
    known = defaultdict(dict)
    for name, parser in parsers.items():
        for action in parser._actions:
            for option in action.option_strings:
                known[option][name] = action
    return known


def test_mistakes_are_one_line_in_every_program(parsers, capsys):
    assert len(parsers) > 25
    for name, parser in parsers.items():
        with pytest.raises(SystemExit, match="2"):
            parser.error("argument --x: 'y' is\nnot allowed")
        line = f"error: argument --x: 'y' is not allowed; see {parser.prog} --help\n"
        assert capsys.readouterr().err == line, name
        assert not parser.allow_abbrev, name


# Options whose values or texts are not the same in all programs that have them, and why
DIFFERING = {
    "--batch-size": "utterances of a training step, or images of a test",
    "--bins": "each analysis has bins of its own: seconds, words, positions, pixels",
    "--data": "what a recipe reads: folders of manifests, pairs of texts, folders of recordings",
    "--dataset": "evaluate takes several",
    "--device": "the results of benchmarks.run are filed by cpu and cuda",
    "--dim": "a picture needs no type that trains",
    "--max-length": "A and B of a hypothesis, or tokens of a sentence",
    "--max-tokens": "frames or subwords of a batch",
    "--model": "of an analysis several; of a training or a picture one, without a name",
    "--output": "where results are written: a folder, one picture, or a file for each side",
    "--preset": "models of the papers, of images or of speech",
    "--recipe": "each recipe has rows of its own",
    "--seed": "plot names its range in its own error",
    "--sizes": "plot takes units of any domain",
    "--source-lang": "a column of a table, or the language of binarised data",
    "--target-lang": "likewise",
    "--test": "test data of the caller: a pair of texts, or the name of a manifest",
    "--test-lengths": "tokens or seconds of a recipe; of plot --test-sizes of sequences",
    "--test-size": "pairs or utterances of the built-in data",
    "--test-sizes": "as --sizes",
    "--test-split": "evaluate tests the whole of the only split",
    "--text": "segmented or not",
    "--train": "subsets of a corpus, or a pair of texts",
    "--train-file": "a table with columns, or files of text",
    "--train-length": "tokens of an exercise, or seconds of speech",
    "--train-size": "pairs or utterances of the built-in data",
    "--valid": "of one pair of texts, or of several",
    "--validation-file": "as --train-file",
    "--vocab-size": "letters may do without",
    "--workers": "processes of a preparation, or threads that read images",
}


def facts_of(action):
    parse = getattr(action.type, "__name__", str(action.type))
    return parse, action.nargs, action.metavar, action.choices and [*action.choices]


def test_an_option_is_the_same_in_all_programs(actions):
    from recipes.lab.command_line import SHARED

    several = {
        option: own
        for option, own in actions.items()
        if len({name.partition(" ")[0] for name in own}) > 1
    }
    differing = set()
    for option, own in several.items():
        shown = [action for action in own.values() if action.help != argparse.SUPPRESS]
        texts = {re.sub(r"[;(]? ?(\(|; |^)default.*", "", action.help or "") for action in shown}
        meaning = SHARED.get(option.removeprefix("--"), {}).get("help")
        if meaning and all(text.startswith(meaning) for text in texts):
            texts = {meaning}
        if len(texts) > 1 or len({str(facts_of(action)) for action in shown}) > 1:
            differing.add(option)
    differing -= {option for option in differing if option.startswith("--position-")}
    assert differing == DIFFERING.keys()


def test_defaults_are_shown(actions):
    silent = [
        (name, option)
        for option, own in actions.items()
        for name, action in own.items()
        if action.default not in (None, False, [], (), argparse.SUPPRESS)
        and "default" not in str(action.help)
    ]
    assert silent == []


def test_no_program_has_another_word_for_the_same_thing(actions):
    words = {
        "--compare": "--variants --types --models",
        "--model": "--checkpoint",
        "--limit": "--sentences",
        "--beam": "--beams",
        "--length-penalty": "--lenpen",
    }
    for option, others in words.items():
        assert option in actions
        assert not actions.keys() & set(others.split()), option


def test_every_training_takes_types_and_seeds(actions):
    comparing = actions["--compare"].keys()
    assert comparing >= {"recipes.mt.run", "recipes.mt.quickstart", "recipes.asr.run"}
    assert comparing == actions["--seeds"].keys()
    assert comparing <= actions["--output"].keys() | {"recipes.mt.run"}  # beside its checkpoints
    for option in ("--position-embedding", "--position-max-global-shift"):
        assert comparing <= actions[option].keys()


def test_a_seed_that_is_given_twice_is_no_second_seed(actions):
    for name, action in actions["--seeds"].items():
        with pytest.raises(argparse.ArgumentError) as error:
            action(None, argparse.Namespace(), [1, 2, 1])
        assert str(error.value) == "argument --seeds: 1 2 1: give each once", name


def test_every_program_that_computes_in_its_own_way_takes_a_device(actions):
    """The Trainer has --use_cpu; quickstart and asr.run have flags of their recipes."""
    trainer = {name for name in actions["--compare"] if name.endswith(("finetune_hf", "whisper"))}
    of_recipes = {"recipes.mt.quickstart", "recipes.asr.run"}
    computing = (actions["--compare"].keys() | actions["--limit"].keys()) - trainer - of_recipes
    assert computing <= actions["--device"].keys()


# ---- make ----------------------------------------------------------------------------------------


def test_make_help_has_a_line_for_each_target():
    targets = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[1]
    # a make that `make test` has started says first which folder it enters
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [re.fullmatch(r"make ([a-z-]+) {2,}(\S.*)", row) for row in said.stdout.splitlines()]
    assert {line[1] for line in lines} == {*targets.split()}
    assert len(lines) == len(targets.split())
