"""Proves that fairseq's commands and its hub interface work on a cape checkpoint, with
``--user-dir`` and without options about positions. Results are compared with an independent
computation or with another command."""

import math
import re
from operator import attrgetter

import pytest
import torch

from fairseq_user_dir import CapeTransformerLanguageModel, CapeTransformerModel
from tests.fairseq.conftest import TARGET_WORDS
from tests.support.expected import types_whose
from tests.support.fairseq_models import (
    USER_DIR,
    encode,
    final_state,
    forced_scores,
    generate_words,
    holds,
    lines,
    load,
    run_here,
    train_words,
)

pytestmark = pytest.mark.slow
SHOWN = 1.5e-4  # the command prints four decimals, and base 2


def hypotheses(output):
    """{sentence: (score, text)} of the best hypotheses."""
    return {i: (float(h[0][0]), h[0][1]) for i, h in lines(output, "H").items()}


def printed_scores(output, index):
    return torch.tensor([float(x) for x in lines(output, "P")[index][0][0].split()])


def interactive_words(data, checkpoint, *extra):
    words = ("--beam", 3, "-s", "en", "-t", "de", *extra)
    return ["fairseq-interactive", *generate_words(data, checkpoint, *words)[1:]]


@pytest.fixture(scope="module")
def generated(run_cli, trained, test_data):
    """Output of fairseq-generate for the test set, beam 3, with alignments."""
    words = ("--beam", 3, "--print-alignment", "hard")
    return run_cli(*generate_words(test_data, trained("cape"), *words)).stdout


def test_interactive_equals_generate(run_cli, trained, corpus, test_data, generated):
    typed = (corpus.text / "test.en").read_text()
    words = interactive_words(test_data, trained("cape"), "--buffer-size", 24, "--batch-size", 5)
    output = run_cli(*words, input=typed).stdout
    ours, expected = hypotheses(output), hypotheses(generated)
    assert ours.keys() == expected.keys() == set(range(24))
    assert [ours[i][1] for i in range(24)] == [expected[i][1] for i in range(24)]
    assert len({text for _, text in ours.values()}) > 5
    for i in ours:
        assert ours[i][0] == pytest.approx(expected[i][0], abs=1e-4)


def test_validate_equals_validation_in_training(trained, corpus):
    output = run_here(
        "fairseq-validate", corpus.binary, "--user-dir", USER_DIR,
        "--path", trained("cape"), "--valid-subset", "valid", "--batch-size", 8, "--cpu",
        "--num-workers", 0,
    )  # fmt: skip
    loss = re.search(r"valid.*\| loss ([\d.]+)", output)[1]
    state = torch.load(trained("cape"), weights_only=True)
    assert float(loss) == pytest.approx(state["extra_state"]["val_loss"], abs=2e-3)


@torch.no_grad()
def attention_of(model, task, source, target):
    """``[T, S]`` of one pass over a single sentence, EOS last on both sides."""
    tokens, words = encode(task.source_dictionary, source), encode(task.target_dictionary, target)
    previous = torch.cat((words[-1:], words[:-1]))
    _, extra = model(tokens[None], torch.tensor([len(tokens)]), previous[None])
    return extra["attn"][0][0]


def test_printed_alignment_pairs_the_words(generated, trained, test_data):
    model, task = load(trained("cape"), test_data)
    sources, alignments = lines(generated, "S"), lines(generated, "A")
    assert len(alignments) == 24
    moved = 0
    for i, (_, hypothesis) in hypotheses(generated).items():
        attention = attention_of(model, task, sources[i][0][0], hypothesis)
        pairs = [tuple(map(int, pair.split("-"))) for pair in alignments[i][0][0].split()]
        assert [target for _, target in pairs] == list(range(len(hypothesis.split())))
        for source, target in pairs:
            on_words = attention[target, :-1]
            assert on_words[source] >= on_words.max() - 1e-4
            moved += bool(source > 0 and on_words[source - 1] < on_words[source] - 1e-4)
    assert moved > 10  # an alignment shifted by one would be noticed


def test_unknown_words_are_replaced_by_the_aligned_source(trained, corpus, tmp_path):
    """By a hard or a soft alignment, or by the entry of a dictionary. The first words of the
    reference force unknown words: names in it are not in the dictionary."""
    text = (corpus.text / "test.en").read_text().splitlines()
    dictionary = tmp_path / "words"
    names = {name for line in text for name in line.split()}
    dictionary.write_text("".join(f"{name} NEW{name}\n" for name in names))
    words = generate_words(corpus.raw, trained("cape"), "--prefix-size", 3, "--dataset-impl", "raw")
    soft = ["--replace-unk", dictionary, "--print-alignment", "soft"]
    copies, others = (
        {i: text.split() for i, (_, text) in hypotheses(run_here(*words, *more)).items()}
        for more in (["--replace-unk"], soft)
    )
    model, task = load(trained("cape"), corpus.raw)
    copied = 0
    for i, named in others.items():
        source = text[i].split()
        hypothesis = ["<unk>" if word.startswith("NEW") else word for word in named]
        attention = attention_of(model, task, text[i], " ".join(hypothesis))[:, : len(source)]
        for position, word in enumerate(hypothesis):
            copy = copies[i][position]
            if word == "<unk>":
                equal = [i for i, name in enumerate(source) if name == copy]
                assert attention[position, equal].max() >= attention[position].max() - 1e-4
                assert named[position] == f"NEW{copy}"
                copied += 1
            else:
                assert copy == named[position]
    assert copied > 5


def test_typed_words_are_copied(trained, test_data):
    """Lines that differ only in unknown words, around a line that is left out as too long; also if
    subwords are joined in the printed source: here all words are joined, because they have no
    marks."""
    names = {0: "anna eva", 2: "bert udo", 3: "carl max", 4: "dora ida"}
    typed = "\n".join(names.get(i, "one " * 1100) for i in range(5))
    words = interactive_words(test_data, trained("cape"), "--buffer-size", 9, "--batch-size", 9)
    words += ["--nbest", 2, "--max-len-b", 8, "--skip-invalid-size-inputs-valid-test"]
    words += ["--replace-unk", "--print-alignment", "hard"]
    plain, joined = (
        run_here(*words, *more, input=typed) for more in ([], ["--post-process", "sentencepiece"])
    )
    assert lines(plain, "A") == lines(joined, "A")
    copied = set()
    for i, alignments in lines(plain, "A").items():
        for (alignment,), (_, text), (_, same) in zip(
            alignments, lines(plain, "H")[i], lines(joined, "H")[i], strict=True
        ):
            assert text.replace(" ", "") == same
            pairs = [tuple(map(int, pair.split("-"))) for pair in alignment.split()]
            for word, (source, _) in zip(text.split(), pairs, strict=True):
                assert word in {"und", *TARGET_WORDS, names[i].split()[source]}
                copied |= {word} - {"und", *TARGET_WORDS}
    assert len(copied) > 3


def test_ensemble_averages_probabilities(trained, test_data):
    paths = f"{trained('cape')}:{trained('stock')}"
    options = ("--beam", 3, "--print-alignment", "soft")
    output = run_here(*generate_words(test_data, paths, *options))
    members = [load(trained(name), test_data) for name in ("cape", "stock")]
    for i, [[source]] in lines(output, "S").items():
        hypothesis = hypotheses(output)[i][1]
        scores = torch.stack([forced_scores(*member, source, hypothesis) for member in members])
        mean = torch.logsumexp(scores * math.log(2), 0) / math.log(2) - 1
        torch.testing.assert_close(mean, printed_scores(output, i), atol=SHOWN, rtol=0)
        assert (scores[0] - scores[1]).abs().max() > 1e-2
        attention = sum(attention_of(*member, source, hypothesis) for member in members) / 2
        rows = [list(map(float, row.split(","))) for row in lines(output, "A")[i][0][0].split()]
        torch.testing.assert_close(torch.tensor(rows), attention, atol=1e-4, rtol=0)


def test_hub_interface_translates_and_scores(trained, corpus, test_data, generated):
    hub, lm = (
        model.from_pretrained(str(trained(name).parent), "checkpoint_last.pt", str(data))
        for model, name, data in (
            (CapeTransformerModel, "cape", test_data),
            (CapeTransformerLanguageModel, "lm", corpus.lm),
        )
    )
    expected = hypotheses(generated)
    for i, [[source]] in lines(generated, "S").items():
        assert hub.translate(source, beam=3, max_len_b=20) == expected[i][1]
    model, task = load(trained("lm"), corpus.lm)
    words = encode(task.source_dictionary, "eins zwei und drei")
    logits, _ = model(torch.cat((words[-1:], words[:-1]))[None])
    scores = logits[0].log_softmax(-1).gather(1, words[:, None])[:, 0]
    expected = scores.detach()[:-1]  # fairseq leaves out the score of EOS
    scored = lm.score("eins zwei und drei")["positional_scores"]
    torch.testing.assert_close(scored, expected)


TRAINED = {
    "admin, checkpoint activations": [
        "--admin-init", "--checkpoint-activations", "--position-relative-context", 3,
        "--position-relative-values", "true",
    ],
    "fp16, radam": [
        "--fp16", "--fp16-init-scale", 4, "--fp16-no-flatten-grads",  # flat ones need a GPU
        "--optimizer", "radam", "--adam-betas", "(0.9,0.98)", "--weight-decay", 0.01,
    ],
    "align, ema, bleu, shared embeddings": [
        "--alignment-heads", 1, "--store-ema", "--share-all-embeddings",
        "--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--eval-bleu-remove-bpe",
        "--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric",
    ],
}  # fmt: skip
TRAINED |= {
    f"{name}, prefix": ["--position-embedding", name]
    for name in types_whose(attrgetter("in_attention"))
}


@pytest.mark.parametrize("name", TRAINED)
def test_model_trained_with_the_options_decodes(name, corpus, test_data, tmp_path):
    """Beam scores agree with one pass; test_stacks.py tests the differences between types of
    position embedding."""
    arch = "cape_transformer_align" if "align" in name else "cape_transformer_tiny"
    log = run_here(*train_words(corpus.binary, tmp_path, *TRAINED[name], arch=arch, updates=10))
    checkpoint = tmp_path / "checkpoint_last.pt"
    prefix = ("--prefix-size", 2) if "prefix" in name else ()
    output = run_here(*generate_words(test_data, checkpoint, "--beam", 4, "--nbest", 4, *prefix))
    model, task = load(checkpoint, test_data)
    model.float()
    sources, hypos, scores = (lines(output, letter) for letter in "SHP")
    assert sorted(hypos) == list(range(24))
    worst = 0.0
    for i, [[source]] in sources.items():
        reverse = " ".join(reversed(source.split()))
        for (_, hypothesis), (printed,) in zip(hypos[i], scores[i], strict=True):
            expected = torch.tensor([float(score) for score in printed.split()])
            forced = forced_scores(model, task, source, hypothesis)
            torch.testing.assert_close(forced, expected, atol=SHOWN, rtol=0)
        moved = forced_scores(model, task, reverse, hypothesis) - forced
        worst = max(worst, moved.abs().max())
    assert worst > 30 * SHOWN  # the comparison notices positions
    assert "loss nan" not in log
    assert ("| bleu " in log) == ("bleu" in name)
    state = torch.load(checkpoint, weights_only=True)
    half = holds(state["model"]["decoder.layers.0.fc1.weight"], torch.float16)
    assert half == ("fp16" in name)
    moments = [moment["exp_avg_sq"] for moment in final_state(tmp_path)[1].values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert sum(moment.sum() for moment in moments) > 0
    assert any("admin" in key for key in state["model"]) == ("admin" in name)
    assert ("ema" in state["extra_state"]) == ("ema" in name)
    embeddings = [state["model"][f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    assert torch.equal(*embeddings) == ("shared" in name)
