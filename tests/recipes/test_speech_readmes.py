"""Commands of the pages of speech, phones and language models, as the programs parse them."""

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
    return [
        line for line in (*blocks, *inline) if re.search(r"recipes[./](asr|phones|lm)[./]", line)
    ]


def parse(command):
    """Exits where an option is unknown or its value is not allowed."""
    words = shlex.split(command)
    place = next(number for number, word in enumerate(words) if "recipes" in word)
    module = importlib.import_module(words[place].removesuffix(".py").replace("/", "."))
    own = [word for word in words[place + 1 :] if word != "--bf16"]  # not on each CPU
    if "--" in own:  # the rest is for fairseq-train
        own = own[: own.index("--")]
    if hasattr(module, "read_options"):
        module.read_options(own)
    elif hasattr(module, "make_options"):  # the Trainer takes the rest
        module.parse(module.make_options(), (), own)
    else:
        module.make_parser().parse_args(own)


PAGES = ("recipes/asr/README.md", "recipes/phones/README.md", "recipes/lm/README.md")
PAGES += ("docs/results.md", "docs/huggingface.md")


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_readme_are_understood(repo_root, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.json").write_text("{}")
    shown = commands((repo_root / page).read_text("utf-8"))
    assert len(shown) >= 2
    for command in shown:
        parse(command)


@pytest.mark.parametrize("words", ["--hop 5", "--hops 500"])
def test_commands_that_are_not_understood_are_seen(words):
    command = "python -m recipes.asr.run --compare sinpos cape"
    parse(f"{command} --hops 5")
    with pytest.raises(SystemExit):
        parse(f"{command} {words}")
