"""Models of fairseq served by ctranslate2: the same translations and scores for every type of
position embedding; without torch, and at and beyond the limits of a folder."""

import json
import random
import re

import pytest
import torch

from cape_plugins import TYPES
from cape_plugins.cli import main
from tests.support.engines import engine_python, program_of, run_program
from tests.support.fairseq_models import PAD, USER_DIR, encode, forced_scores, lines, load
from tests.support.served_fairseq import ALPHA, TYPE_FLAGS, draw, flags_of, spell
from tests.support.translation_models import save_language_model

ctranslate2 = pytest.importorskip("ctranslate2")
CAP = 48
LN2 = 0.6931471805599453
RELPOS, CAPE, SINPOS = TYPE_FLAGS["relpos"], TYPE_FLAGS["cape"], TYPE_FLAGS["sinpos"]
RELATIVE = ("--position-relative-context", "3", "--position-relative-values", "true")
FIRST_LAYER = ("--position-relative-layers", "first")
LEARNED_STEPS = ("--position-learned-table", "true", "--position-max-position", "24")
NORM_FIRST = ("--layernorm-embedding",)

# name to norm, flags, and what the tests' checkpoints can be besides
SETTINGS = {
    **{
        name: (("post-LN", "pre-LN")[number % 2], TYPE_FLAGS[name], {})
        for number, name in enumerate(TYPES)
    },
    "relative values, clipped": ("post-LN", (*RELPOS, "--position-relative-values", "true"), {}),
    "relative, nothing beyond": (
        "pre-LN",
        (*RELPOS, *RELATIVE, "--position-relative-beyond", "zero"),
        {},
    ),
    "relative, first layer": ("post-LN", (*RELPOS, *FIRST_LAYER), {}),
    "relative beside cape": ("pre-LN", (*CAPE, *RELATIVE), {}),
    "learned steps": ("pre-LN", (*TYPE_FLAGS["randpos"], *LEARNED_STEPS), {}),
    "BOS and alpha of sinusoids": (
        "post-LN",
        (*SINPOS, "--position-source-bos", "true", "--position-source-scale", ALPHA),
        {},
    ),
    "norm of embeddings, no scale": ("pre-LN", (*CAPE, *NORM_FIRST, "--no-scale-embedding"), {}),
    "other dictionaries, decoder shared": (
        "post-LN",
        (*CAPE, "--share-decoder-input-output-embed"),
        {"separate": True},
    ),
    "ADMIN": ("post-LN", CAPE, {"admin": True}),
    "ADMIN, norm of embeddings": ("post-LN", (*SINPOS, *NORM_FIRST), {"admin": True}),
    "ADMIN, relative": ("post-LN", RELPOS, {"admin": True}),
    "ADMIN, other dictionaries": ("post-LN", CAPE, {"admin": True, "separate": True}),
    "sides differ": (
        "post-LN",
        (*CAPE, "--encoder-normalize-before", "--encoder-attention-heads", "4",
         "--activation-fn", "gelu_accurate", "--no-decoder-final-norm"),
        {},
    ),
    "aligned": ("pre-LN", (*CAPE, "--arch", "cape_transformer_align"), {}),
}  # fmt: skip
FAST = ("cape", "ADMIN")


def exported(checkpoint, folder, *more):
    main(["export", "ctranslate2", str(checkpoint), str(folder), *map(str, more)])
    return str(folder)


def words(count, seed=3):
    ((row,)) = draw(random.Random(seed), 1, count, count)
    return spell(row).split()


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def test_translations_are_those_of_fairseq(name, models, tmp_path, capsys):
    norm, flags, choice = SETTINGS[name]
    checkpoint = models.save(name, norm, *flags, **choice)
    rows = ("--max-source-tokens", CAP, "--max-target-tokens", CAP)
    exported(checkpoint, tmp_path / "out", *rows, "--check", models.text)
    report = capsys.readouterr().out
    same, ended, difference = re.search(
        r"check: (\d+) of (\d+) .* by at most (\S+?);?\s", report
    ).groups()
    assert same == ended
    assert int(ended) >= 170  # of 200
    assert float(difference) <= 1e-5


@pytest.mark.slow
def test_program_of_the_readme_needs_neither_torch_nor_this_package(models, run_cli, tmp_path):
    checkpoint = models.save("program", "post-LN", *CAPE)
    folder = tmp_path / "out"
    limit = ("--max-target-tokens", CAP)
    run_cli("cape-plugins", "export", "ctranslate2", checkpoint, folder, *limit, fresh=True)
    python = engine_python(tmp_path / "alone", "ctranslate2")
    printed = run_program(python, program_of(folder), folder, models.text).splitlines()
    wanted = run_cli(
        "fairseq-interactive", models.data / "binary", "--user-dir", USER_DIR, "--path",
        checkpoint, "--input", models.text, "--cpu", "--beam", 5, "--min-len", 0,
        "--max-len-b", CAP, "--batch-size", 100, "--buffer-size", 200,
        "--source-lang", "en", "--target-lang", "de",
    ).stdout  # fmt: skip
    hypotheses = [fields[0][1] for _, fields in sorted(lines(wanted, "H").items())]
    ended = [number for number, text in enumerate(hypotheses) if len(text.split()) < CAP]
    assert len(printed) == len(hypotheses) == 200
    assert len(ended) >= 170
    assert [printed[number] for number in ended] == [hypotheses[number] for number in ended]

    # 1024 is where the engine would cut by default, and the table ends there, too
    long = tmp_path / "long.en"
    long.write_text(" ".join(words(1023)) + "\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="No position encodings are defined"):
        run_program(python, program_of(folder), folder, long)


@pytest.mark.parametrize(("name", "norm"), [("cape", "post-LN"), ("relpos", "post-LN")])
def test_scores_at_2000_tokens_are_those_of_fairseq(name, norm, models, tmp_path):
    checkpoint = models.save("long", norm, *TYPE_FLAGS[name])
    rows = ("--max-source-tokens", 2002, "--max-target-tokens", 2001)
    translator = ctranslate2.Translator(exported(checkpoint, tmp_path / "out", *rows))
    source, target = words(2000), words(2000, seed=4)
    (scored,) = translator.score_batch([source], [target], max_input_length=0)
    model, task = load(checkpoint, models.data / "binary")
    wanted = forced_scores(model, task, " ".join(source), " ".join(target)) * LN2
    assert len(scored.log_probs) == 2001  # EOS, too
    torch.testing.assert_close(torch.tensor(scored.log_probs), wanted, rtol=0, atol=1e-5)


def test_table_is_used_to_its_end_and_no_further(models, tmp_path):
    checkpoint = models.save("limit", "post-LN", *CAPE)
    rows = ("--max-source-tokens", 12, "--max-target-tokens", 11)
    translator = ctranslate2.Translator(exported(checkpoint, tmp_path / "out", *rows))
    fits, too_long = words(10), words(11)  # with BOS and EOS; start and words in the target
    assert len(translator.score_batch([fits], [fits])[0].log_probs) == 11
    for source, target in ((too_long, fits), (fits, too_long)):
        with pytest.raises(RuntimeError, match="No position encodings are defined"):
            translator.score_batch([source], [target])


def test_relative_positions_alone_have_no_limit(models, tmp_path):
    """And the README names the padding, which has to be forbidden."""
    checkpoint = models.save("endless", "pre-LN", *RELPOS)
    rows = ("--max-source-tokens", 4, "--max-target-tokens", 4)
    folder = exported(checkpoint, tmp_path / "out", *rows)
    (scored,) = ctranslate2.Translator(folder).score_batch([words(60)], [words(60)])
    assert len(scored.log_probs) == 61
    readme = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert readme.count("no table of positions") == 2
    names = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text("utf-8"))
    assert f"`suppress_sequences=[['{names[PAD]}']]` forbids it" in readme


def test_attention_is_that_of_the_layer_and_heads_that_were_aligned(models, tmp_path):
    """Though relative positions beside others put a layer before the first."""
    aligned = ("--arch", "cape_transformer_align", "--alignment-layer", 0, "--alignment-heads", 1)
    checkpoint = models.save("attention", "pre-LN", *CAPE, *aligned, *RELATIVE)
    translator = ctranslate2.Translator(exported(checkpoint, tmp_path / "out"))
    source = words(6)
    (result,) = translator.translate_batch([source], return_attention=True, max_decoding_length=5)
    model, task = load(checkpoint, models.data / "binary")
    tokens = encode(task.source_dictionary, " ".join(source))[None]
    target = encode(task.target_dictionary, " ".join(result.hypotheses[0]))
    previous = torch.cat((target[-1:], target[:-1]))[None]
    with torch.no_grad():
        _, more = model(tokens, torch.tensor([tokens.shape[1]]), previous)
    wanted = more["attn"][0][0, : len(target) - 1, :-1]  # without EOS, and BOS is not there
    got = torch.tensor(result.attention[0])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_int8_leaves_the_model_as_it_is(models, tmp_path):
    from fairseq_user_dir.serving.ctranslate2 import write_model
    from fairseq_user_dir.serving.source_checkpoint import load_source

    source = load_source(models.save("kept", "post-LN", *CAPE, admin=True))
    before = {name: value.clone() for name, value in source.model.state_dict().items()}
    write_model(source, tmp_path, {"source": 20, "target": 20}, "int8")
    after = source.model.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


# ---- language models -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TYPES))
def test_language_models_score_as_in_fairseq(name, models, tmp_path, capsys):
    norm = ("--decoder-normalize-before",) if len(name) % 2 else ()
    flags = (*flags_of(name, "decoder"), *norm)
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *flags)
    folder = exported(checkpoint, tmp_path / "out", "--check", models.text)
    difference = re.search(r"differ by at most (\S+)", capsys.readouterr().out)[1]
    assert float(difference) <= 1e-5

    model, task = load(checkpoint, models.lm_data)
    text = words(700, seed=6)
    tokens = encode(task.source_dictionary, " ".join(text))
    with torch.no_grad():
        logits, _ = model(torch.cat((tokens[-1:], tokens[:-1]))[None])
    wanted = logits[0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    generator = ctranslate2.Generator(folder)
    (scored,) = generator.score_batch([["</s>", *text, "</s>"]], max_input_length=0)
    torch.testing.assert_close(torch.tensor(scored.log_probs), wanted, rtol=0, atol=1e-5)


WITHOUT_FINAL_NORM = ("--decoder-normalize-before", "--no-decoder-final-norm")


@pytest.mark.parametrize("more", [("--add-bos-token",), WITHOUT_FINAL_NORM])
def test_language_model_continues_as_in_fairseq(more, models, tmp_path):
    flags = (*flags_of("cape", "decoder"), *more)
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *flags)
    exported(checkpoint, tmp_path / "out", "--max-target-tokens", 30)
    text = tmp_path / "text"
    text.write_bytes(b"w1 w2\rw3\nw7\r\n")  # a carriage return is white space, and ends no line
    python = engine_python(tmp_path / "alone", "ctranslate2")
    printed = run_program(python, program_of(tmp_path / "out"), tmp_path / "out", text)

    model, task = load(checkpoint, models.lm_data)
    symbols, wanted = task.source_dictionary, []
    for line in ("w1 w2 w3", "w7"):
        start = symbols.bos() if "--add-bos-token" in more else symbols.eos()
        tokens = [start, *encode(symbols, line)[:-1].tolist()]
        while len(tokens) <= 30:  # the start has no part in the length
            with torch.no_grad():
                logits, _ = model(torch.tensor([tokens]))
            tokens.append(logits[0, -1].argmax().item())
            if tokens[-1] == symbols.eos():
                break
        wanted.append(" ".join(symbols[index] for index in tokens[1:]).removesuffix(" </s>"))
    assert printed.splitlines() == wanted
