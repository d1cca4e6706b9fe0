"""The commands of the READMEs of speech, phones and language models, parsed as the programs parse them."""

import importlib
import re
import shlex

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")


def commands(text):
    """Lines of code blocks that start a program of recipes, continued ones joined."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    blocks = [line.partition(" #")[0].strip() for line in lines if line.startswith("    ")]
    inline = re.findall(r"`(python -m recipes[^`]*)`", text.replace("\n", " "))
    return [line for line in (*blocks, *inline) if re.search(r"recipes[./]\w+[./]\w+", line)]


def parse(command):
    """Exits where an option is unknown or its value is not allowed."""
    words = shlex.split(command)
    place = next(number for number, word in enumerate(words) if "recipes" in word)
    module = importlib.import_module(words[place].removesuffix(".py").replace("/", "."))
    own = words[place + 1 :]
    if "--" in own:  # the rest is for fairseq-train
        own = own[: own.index("--")]
    if hasattr(module, "make_options"):  # the Trainer takes the rest
        module.parse(module.make_options(), (), own)
    else:
        module.make_parser().parse_args(own)


@pytest.mark.parametrize("page", ["recipes/asr", "recipes/phones", "recipes/lm"])
def test_commands_of_the_readme_are_understood(repo_root, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.json").write_text("{}")
    page = (repo_root / page / "README.md").read_text("utf-8")
    assert len(commands(page)) >= 5
    for command in commands(page):
        parse(command)


@pytest.mark.parametrize("words", ["--hop 5", "--hops 500"])
def test_commands_that_are_not_understood_are_seen(words):
    command = "python -m recipes.asr.run --compare sinpos cape"
    parse(f"{command} --hops 5")
    with pytest.raises(SystemExit):
        parse(f"{command} {words}")
