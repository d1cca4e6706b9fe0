"""Proves that a user's mistake stops fairseq's commands with one line that names flags, and that
all other errors keep their traceback."""

import linecache
import pickle
import re
import shutil
import sys
from pathlib import Path

import fairseq
import pytest
import torch.multiprocessing
from fairseq import options

import cape_plugins
import fairseq_user_dir.asr
from cape_plugins import PositionConfig
from cape_plugins.settings.arguments import text_in_flags
from cape_plugins.settings.options import OptionError
from fairseq_user_dir.flags import DECODER_PREFIX
from fairseq_user_dir.host.errors import SettingsError, print_without_traceback
from tests.support.fairseq_models import USER_DIR, run_here, train_words
from tests.support.fairseq_speech import make_task, write_manifest


def refusal_of(**settings):
    with pytest.raises(ValueError, match="allowed") as refused:
        PositionConfig(**settings)
    return refused.value


def test_options_are_named_by_their_flags():
    """Also options that only the remedy names; values are written as on a command line."""
    tables = refusal_of(type="randpos", learned_table=True, max_position=0)
    assert str(tables).startswith("learned_table=True has no rows; allowed: max_position >= 1, ")
    assert text_in_flags(tables).startswith(
        "--position-learned-table true has no rows; allowed: --position-max-position >= 1, "
    )
    assert "; allowed: --position-decoder-max-position" in text_in_flags(tables, DECODER_PREFIX)
    assert text_in_flags(refusal_of(gamma="")).startswith("--position-gamma '' is not allowed")
    assert text_in_flags(refusal_of(type="capee")).startswith("--position-embedding capee is ")
    assert text_in_flags(ValueError("gamma=3")) == "gamma=3"  # not the text of an option
    assert str(pickle.loads(pickle.dumps(tables))) == str(tables)


COMMAND, PROGRAM = "lib/fairseq_cli/train.py", "lib/my_program.py"


@pytest.fixture
def printed(monkeypatch, capsys):
    """Function that returns what a program prints that ends by an error: the source and the file of
    the program, and names for it."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["bin/fairseq-train", "data"])
    print_without_traceback()

    def run(source, file=COMMAND, **names):
        source_lines = source.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, file, (0, None, source_lines, file))
        try:
            exec(compile(source, file, "exec"), names)
        except Exception as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)
            raised.__traceback__ = None  # it may be raised again
        return capsys.readouterr().err

    return run


def test_commands_print_one_line_and_other_programs_a_traceback(printed):
    error = SettingsError("--position-x 3 is\nnot allowed")
    expected = "fairseq-train: error: --position-x 3 is not allowed\n"
    assert printed("raise error", error=error) == expected
    assert "Traceback" in printed("raise error", PROGRAM, error=error)


OF_PROJECT = OptionError("max_offset", 3, "is\nnot allowed")
BELOW = [
    (fairseq, ValueError("--x 3 is impossible"), True),
    (fairseq, Exception("--x 3 is impossible"), True),
    (fairseq, KeyError("--x 3 is impossible"), False),
    (fairseq, RuntimeError("--x 3 is impossible"), False),
    (cape_plugins, OF_PROJECT, True),
    (fairseq_user_dir.asr, OF_PROJECT, True),
    (torch, OF_PROJECT, False),
]


@pytest.mark.parametrize(("package", "error", "refused"), BELOW)
def test_what_a_package_refuses_is_one_line(package, error, refused, printed, monkeypatch):
    """An error that a statement of a package raises with a reason. Other kinds of errors, and
    errors of other packages, may be faults."""
    file = str(Path(package.__file__).parent / "no_such_module.py")
    monkeypatch.setitem(linecache.cache, file, (0, None, ["raise error\n"], file))
    below = compile("raise error", file, "exec")
    text = printed("exec(below)", below=below, error=error)
    message = "fairseq-train: error: --.* 3 is (impossible|not allowed).?\n"
    assert bool(re.fullmatch(message, text)) == refused
    assert ("Traceback" in text) != refused


REFUSALS = {
    "assert of one line": "assert not error, error",
    "assert": "assert (\n    error is None or error == 3\n), error",
    "raise in a block": "if error:\n    raise Exception(\n        '%s' % (\n  error\n)\n    )",
    "package asked for": "raise ImportError(error)",
    "package missing": "import package_that_is_not_there",
}
FAULTS = {
    "no statement": "value = int(\n    error\n)",
    "condition": "assert (\n    [].index(error)\n), 'never'",
    "key": "raise KeyError(error)",
}


@pytest.mark.parametrize("name", [*REFUSALS, *FAULTS])
def test_a_refusal_is_known_by_its_statement_however_many_lines_it_has(name, printed):
    """Python reports the line of the condition, not the first line of the statement."""
    text = printed((REFUSALS | FAULTS)[name], error="--x 3 is impossible")
    message = r"(--x 3 is impossible|No module named '\w+'; install it with pip.*)\n"
    assert bool(re.fullmatch(f"fairseq-train: error: {message}", text)) == (name in REFUSALS)
    assert ("Traceback" in text) == (name in FAULTS)


def _fail(rank, message):
    raise SettingsError(message) if message else KeyError("bug")


@pytest.mark.parametrize("message", ["--position-x 3 is not allowed", ""])
def test_processes_of_several_gpus_print_one_line(message, printed):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as raised:
        torch.multiprocessing.start_processes(_fail, (message,), start_method="fork")
    text = printed("raise error", error=raised.value)
    assert (text == f"fairseq-train: error: {message}\n") == bool(message)
    assert ("Traceback" in text) != bool(message)


PARSERS = {
    "generate": options.get_generation_parser,
    "interactive": lambda: options.get_generation_parser(interactive=True),
    "eval-lm": options.get_eval_lm_parser,
    "validate": options.get_validation_parser,
    "train": options.get_training_parser,
}


def refusal(command, *words, capsys):
    trains = command == "train"
    model = ["--arch", "cape_transformer_tiny"] if trains else ["--path", "checkpoint.pt"]
    words = ["data", "--task", "translation", *model, *words]
    with pytest.raises(SystemExit, match="2"):
        options.parse_args_and_arch(PARSERS[command](), words)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", PARSERS)
def test_overrides_and_shards_that_are_none_are_refused(command, capsys):
    for text in ("foo", "['foo']", "") if command != "train" else ():
        line = refusal(command, "--model-overrides", text, capsys=capsys)
        assert f"error: --model-overrides {text or repr('')} is not allowed; allowed: " in line
    shards = ["--num-shards", "2"]
    line = refusal(command, *shards, "--shard-id", "2", capsys=capsys)
    assert "error: --shard-id 2 with --num-shards 2 is " in line
    if command in ("validate", "train", "interactive"):  # which share nothing out
        line = refusal(command, *shards, capsys=capsys)
        assert "error: --num-shards 2 is not for " in line


# Words, and what the line has to say. {speech}, {cape} ... are made by fixtures.
POSITIONS = (
    "fairseq-validate {binary} --path {cape} --batch-size 1 "
    "--model-overrides {{'position_max_local_shift':2}}"
)
SHORT = "fairseq-generate {binary} --path {cape} --max-source-positions"
REFUSED = {
    POSITIONS: "--position-max-local-shift 2",
    "fairseq-generate {speech} --task cape_asr --path {cape}": "trained with --task translation, ",
    "fairseq-generate {speech} --path {cape}": "language pair.* --task of the checkpoint",
    "fairseq-generate {binary} --path gone.pt": "Model file not found: gone.pt; .*--path",
    "fairseq-generate {binary} --path {cape} --gen-subset gone": "gone .*; .*--gen-subset",
    f"{SHORT} 5": "since max_positions.*--skip-invalid-size-inputs-valid",
    f"{SHORT} 1 --skip-invalid-size-inputs-valid-test": "no sentence is left",
    "fairseq-generate {binary} --path {cape} --num-shards 9 --shard-id 8": "--shard-id 8 has no s",
    "fairseq-eval-lm {binary} --path {lm}": "No such file or directory: .*dict.txt",
    "fairseq-train {binary} --finetune-from-model gone.pt": "gone.pt does not exist",
    "fairseq-train {binary} --restore-file gone.pt": "--restore-file gone.pt: no such file",
    "fairseq-train {separate} --share-all-embeddings": "--joined-dictionary",
}


@pytest.fixture(scope="module")
def places(corpus, trained, tmp_path_factory):
    """Folders and checkpoints by name."""
    pytest.importorskip("soundfile")
    speech = tmp_path_factory.mktemp("speech")
    for split in ("train", "test"):
        write_manifest(speech, split, [1.0, 0.5])
    make_task(speech)  # writes the dictionary
    separate = shutil.copytree(corpus.binary, tmp_path_factory.mktemp("separate") / "data")
    (separate / "dict.de.txt").write_text("eins 3\n")
    folders = {"binary": corpus.binary, "speech": speech, "separate": separate}
    return folders | {name: trained(name) for name in ("cape", "lm")}


@pytest.fixture
def refused(places, tmp_path):
    """Function: the words of a row of the table, and a pattern of the last line."""

    def row(text):
        command, data, *words = [word.format(**places) for word in text.split()]
        if command == "fairseq-train":
            words = train_words(data, tmp_path / "run", *words)
        else:
            words = [command, data, "--user-dir", USER_DIR, "--cpu", *words]
        return words, f"{command}: error: .*{REFUSED[text]}"

    return row


@pytest.mark.slow
def test_a_command_that_refuses_ends_with_status_1_and_one_line(run_cli, refused):
    words, message = refused(POSITIONS)
    result = run_cli(*words, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr + result.stdout
    assert re.match(message, result.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("text", list(REFUSED)[1:])
def test_what_does_not_belong_together_is_refused_in_one_line(
    text, refused, printed, monkeypatch, capsys
):
    words, message = refused(text)
    with pytest.raises(Exception) as raised:  # noqa: PT011 the line is what matters
        run_here(*words)
    monkeypatch.setattr(sys, "argv", words)
    capsys.readouterr()
    sys.excepthook(raised.type, raised.value, raised.tb)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(message, line)
