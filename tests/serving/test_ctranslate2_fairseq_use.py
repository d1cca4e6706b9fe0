"""A folder for ctranslate2 in use: without torch, at and beyond its limits, in int8; language
models of fairseq."""

import json
import random
import re

import pytest
import torch
from sacrebleu.metrics import BLEU

from cape_plugins import TYPES
from cape_plugins.cli import main
from tests.support.engines import engine_python, program_of, run_program
from tests.support.fairseq_models import PAD, USER_DIR, encode, forced_scores, lines, load
from tests.support.served_fairseq import (
    TYPE_FLAGS,
    draw,
    flags_of,
    spell,
    train,
    translation,
)
from tests.support.translation_models import save_language_model

ctranslate2 = pytest.importorskip("ctranslate2")
CAP = 48
LN2 = 0.6931471805599453


def exported(checkpoint, folder, *more):
    main(["export", "ctranslate2", str(checkpoint), str(folder), *map(str, more)])
    return str(folder)


def words(count, seed=3):
    ((row,)) = draw(random.Random(seed), 1, count, count)
    return spell(row).split()


@pytest.mark.slow
def test_program_of_the_readme_needs_neither_torch_nor_this_package(models, run_cli, tmp_path):
    checkpoint = models.save("program", "post-LN", *TYPE_FLAGS["cape"])
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


@pytest.mark.parametrize(
    ("name", "norm"), [("cape", "post-LN"), ("abspos", "pre-LN"), ("relpos", "post-LN")]
)
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
    checkpoint = models.save("limit", "post-LN", *TYPE_FLAGS["cape"])
    rows = ("--max-source-tokens", 12, "--max-target-tokens", 11)
    translator = ctranslate2.Translator(exported(checkpoint, tmp_path / "out", *rows))
    fits, too_long = words(10), words(11)  # with BOS and EOS; start and words in the target
    assert len(translator.score_batch([fits], [fits])[0].log_probs) == 11
    for source, target in ((too_long, fits), (fits, too_long)):
        with pytest.raises(RuntimeError, match="No position encodings are defined"):
            translator.score_batch([source], [target])


def test_relative_positions_alone_have_no_limit(models, tmp_path):
    checkpoint = models.save("endless", "pre-LN", *TYPE_FLAGS["relpos"])
    rows = ("--max-source-tokens", 4, "--max-target-tokens", 4)
    folder = exported(checkpoint, tmp_path / "out", *rows)
    (scored,) = ctranslate2.Translator(folder).score_batch([words(60)], [words(60)])
    assert len(scored.log_probs) == 61
    assert (tmp_path / "out" / "README.md").read_text().count("no table of positions") == 2


def test_engine_cuts_a_source_at_1024_tokens_unless_told_not_to(models, tmp_path):
    checkpoint = models.save("cut", "post-LN", *TYPE_FLAGS["cape"])
    folder = exported(checkpoint, tmp_path / "out", "--max-source-tokens", 1200)
    translator = ctranslate2.Translator(folder)
    source, target = words(1100), words(5)
    cut, whole = (
        translator.score_batch([source], [target], **options)[0].log_probs
        for options in ({}, {"max_input_length": 0})
    )
    (first,) = translator.score_batch([source[:1022]], [target])  # BOS and EOS count
    assert cut == pytest.approx(first.log_probs, abs=1e-6)
    assert cut != pytest.approx(whole, abs=1e-4)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "`max_input_length` is 1024 by default" in readme
    assert "max_input_length=0" in program_of(tmp_path / "out")


def test_padding_has_the_name_that_the_readme_forbids(models, tmp_path):
    checkpoint = models.save("padding", "post-LN", *TYPE_FLAGS["nopos"])
    exported(checkpoint, tmp_path / "out")
    names = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text("utf-8"))
    readme = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert f"`suppress_sequences=[['{names[PAD]}']]` forbids it" in readme


@pytest.mark.parametrize("more", [(), ("--position-relative-context", 3)])
def test_attention_is_that_of_the_layer_and_heads_that_were_aligned(more, models, tmp_path):
    aligned = ("--arch", "cape_transformer_align", "--alignment-layer", 0, "--alignment-heads", 1)
    checkpoint = models.save("attention", "pre-LN", *TYPE_FLAGS["cape"], *aligned, *more)
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

    source = load_source(models.save("kept", "post-LN", *TYPE_FLAGS["cape"], admin=True))
    before = {name: value.clone() for name, value in source.model.state_dict().items()}
    write_model(source, tmp_path, {"source": 20, "target": 20}, "int8")
    after = source.model.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.slow
def test_int8_keeps_the_score_of_a_trained_model(models, tmp_path, capsys):
    checkpoint = models.save("trained", "pre-LN", *TYPE_FLAGS["sinpos"], "--dropout", 0)
    state = torch.load(checkpoint, weights_only=True)
    state["model"] = train(checkpoint, models.data, updates=300)
    torch.save(state, checkpoint)
    sources = [spell(row) for row in models.short]
    wanted = [spell(translation(row)) for row in models.short]
    scores = {}
    for precision in ("float32", "int8"):
        more = ("--quantization", precision, "--check", models.text)
        folder = exported(checkpoint, tmp_path / precision, *more, "--max-target-tokens", CAP)
        results = ctranslate2.Translator(folder, compute_type=precision).translate_batch(
            [source.split() for source in sources], beam_size=5
        )
        texts = [" ".join(result.hypotheses[0]) for result in results]
        scores[precision] = BLEU(tokenize="none").corpus_score(texts, [wanted]).score
    assert scores["float32"] > 80
    # The training gives another model on another processor: seen are less than 1 BLEU on one, and
    # 1.4 on another, which are two sentences of 100.
    assert scores["int8"] == pytest.approx(scores["float32"], abs=3)
    reports = re.findall(r"check: .* at most ([\d.e-]+)", capsys.readouterr().out)
    exact, rounded = map(float, reports)
    assert exact <= 1e-5
    assert rounded > 1e-3  # reported, not refused
    sizes = {name: (tmp_path / name / "model.bin").stat().st_size for name in scores}
    assert sizes["int8"] < 0.7 * sizes["float32"]  # tables of positions are not rounded


# ---- language models -----------------------------------------------------------------------------


def lm_flags(name):
    return flags_of(name, "decoder")


@pytest.mark.parametrize("name", list(TYPES))
def test_language_models_score_as_in_fairseq(name, models, tmp_path, capsys):
    flags = lm_flags(name)
    norm = ("--decoder-normalize-before",) if len(name) % 2 else ()
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *flags, *norm)
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


@pytest.mark.parametrize("more", [(), ("--add-bos-token",), WITHOUT_FINAL_NORM])
def test_language_model_continues_as_in_fairseq(more, models, tmp_path):
    flags = (*lm_flags("cape"), *more)
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
