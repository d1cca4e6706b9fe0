"""Texts that fairseq runs as Python are read as data: numbers, quoted texts and collections."""

import pytest

from cape_plugins.checkpoints.fairseq_files import literal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10000,50000", (10000, 50000)),
        (" (0.9, 0.98)", (0.9, 0.98)),
        ("True", True),
        ("-1", -1),
        ("[(512, 3)] * 2 + [(1024, 3)] * 1", [(512, 3), (512, 3), (1024, 3)]),
        ("('lm.bin', 'words.txt', 2, -1)", ("lm.bin", "words.txt", 2, -1)),
        ("{'name': 'scaled_dot_product', 'dropout': 0.1}", None),
    ],
)
def test_data_in_a_text_are_read(text, value):
    assert literal(text) == (eval(text.strip()) if value is None else value)


RUNNING = (
    "print(1)",
    "[print(1)]",
    "[1] + print(1)",
    "{'name': print(1)}",
    "print",
    "(1).real",
    "[1][0]",
    "[print for _ in (1,)]",
    "f'{print(1)}'",
    "lambda: 1",
    "1 and 2",
    "2 ** 99",
    "[0] * 10 ** 9",
    "[0] * 999999999",
    "[1] * [2]",
    "(" * 500,
    "x = 1",
    "",
)


@pytest.mark.parametrize("text", RUNNING)
def test_all_other_texts_are_refused(text, capsys):
    with pytest.raises(ValueError, match="is not allowed, because fairseq would run it as Python"):
        literal(text)
    assert capsys.readouterr().out == ""
