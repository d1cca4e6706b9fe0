"""The commands of the README's section on fairseq, with a small model and small data."""

import re
import shlex

import pytest

from tests.support.fairseq_models import ROOT, TINY_FLAGS, lines, load


def commands_of_the_readme():
    """The words of each command line of the section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    section = text.partition("\n## fairseq\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^ {4}(fairseq-.*)$", section, re.MULTILINE)
    return [shlex.split(command.removesuffix("...")) for command in commands]


@pytest.mark.slow
def test_readme_trains_and_generates(run_cli, corpus, tmp_path):
    train, generate = commands_of_the_readme()
    assert (train[0], generate[0]) == ("fairseq-train", "fairseq-generate")
    places = {
        "data-bin/iwslt14": corpus.binary,
        "checkpoints/checkpoint_best.pt": tmp_path / "checkpoint_best.pt",
    }
    train, generate = ([places.get(word, word) for word in words] for words in (train, generate))
    small = ["--save-dir", tmp_path, "--max-update", 2, "--cpu", *TINY_FLAGS]
    run_cli(*train, *small, cwd=ROOT)
    model, _ = load(tmp_path / "checkpoint_best.pt", corpus.binary)
    assert model.position_config.type == "cape"
    output = run_cli(*generate, "--cpu", "--max-len-b", 9, cwd=ROOT).stdout
    assert len(lines(output, "H")) == 24
