"""The benchmarks run and leave complete tables. How fast things are is never asserted in a test."""

import csv
import logging
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks import (
    attention,
    embedding,
    families,
    hosts,
    huggingface,
    measure,
    report,
    run,
    serving,
    speech,
    vision,
)
from benchmarks.memory import peak_resident
from cape_plugins import ENCODINGS, TYPES

SETUP = measure.Setup(torch.device("cpu"), torch.float32)
FEW = {name: TYPES[name] for name in ("sinpos", "abspos", "cape")}  # the others cost time only
EMBEDDINGS = {"stock", "stock + add", *FEW, *(f"{name} + add" for name in FEW)}
CONTEXTS = {"no positions", "context 5", "context 20"}
MALLOC = {"fresh pages", "pages kept"}
ATTENTION_CASES = {"translation, 4 x 20", "images, 2 x 32 px"}

# rows that are expected: values of these columns, each combination once
EXPECTED = {
    "embedding": {"variant": EMBEDDINGS, "T": {"10", "100"}, "malloc": MALLOC},
    "training": {"variant": {"stock", *FEW, "cape, no BOS"}, "B x T": {"4 x 20", "2 x 40"}},
    "relative": {"variant": CONTEXTS, "part": {"layer", "encoder", "decoder"}, "T": {"10", "20"}},
    "attention": {"variant": {*attention.types()}, "case": ATTENTION_CASES},
    "generation": {"variant": {"stock", *FEW, "cape, no BOS"}, "T": {"5", "10"}},
}
# families differ in their variants
HF_VARIANTS = ("stock", "sinpos", "shape", "cape")
HF_CASES = {"ViT-Ti, training": {*HF_VARIANTS}}
for part in ("training", "beam search"):
    HF_CASES[f"Speech2Text, {part}"] = {*HF_VARIANTS}
    HF_CASES[f"Marian, {part}"] = {*HF_VARIANTS, "cape, no BOS"}
NUMBERS = ("milliseconds", "ratio", "ratio_low", "ratio_high", "rounds")
FLAGS = ("--quick", "--rounds", "1", "--warm-up", "1", "--output")


@pytest.fixture(scope="module")
def results(run_cli, tmp_path_factory) -> Path:
    """Folder with the results of a quick run of everything: of one benchmark by the command line,
    of the others here. The runs have few types and one family of each group, draw no figure, and
    measure the memory of a single process, which has no torch."""
    folder = tmp_path_factory.mktemp("results")
    run_cli("python", "-m", "benchmarks.run", "relative", *FLAGS, folder)
    others = [name for name in run.BENCHMARKS if name != "relative" and not run.lacking(name)]
    measure_peak, export = serving.peak_memory, serving.export
    engines = {name: make for name, make in serving.TRANSLATORS.items() if name != serving.ONNX}

    def peak_of_ctranslate2(make, folder, search):
        is_measured = make is serving.TRANSLATORS["CTranslate2"] and search.beam == 1
        return measure_peak(make, folder, search) if is_measured else math.nan

    groups = {id(group): name for name, group in families.FAMILIES.items()}
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, embedding, huggingface, speech):
            patch.setattr(module, "peak_memory", lambda setup, make, *args: 1.0)
        for module in (embedding, hosts, speech):
            patch.setattr(module, "TYPES", FEW)
        patch.setattr(serving, "peak_memory", peak_of_ctranslate2)
        patch.setattr(serving, "TRANSLATORS", engines)
        patch.setattr(serving, "export", lambda to, *words: to == "onnx" or export(to, *words))
        patch.setattr(serving, "TINY", {**serving.TINY, "layers": 1})
        few = {name: families.FAMILIES[name] for name in groups.values()}
        patch.setattr(families, "FAMILIES", few)
        patch.setattr(embedding, "in_new_process", lambda function, *args: function(*args))
        patch.setattr(embedding, "keep_pages", lambda: None)
        patch.setattr(measure.gc, "collect", lambda: 0)
        patch.setattr(report, "write_figure", lambda path, figure: path.touch())
        try:
            run.main([*others, *FLAGS, str(folder)])
        finally:
            logging.disable(logging.NOTSET)
    return folder


def file_of(folder: Path, name: str, ending: str = "csv") -> Path:
    (path,) = folder.glob(f"{name}-cpu-torch*.{ending}")
    return path


def read_rows(folder: Path, name: str) -> list[dict[str, str]]:
    """The table of a benchmark."""
    with open(file_of(folder, name), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_every_combination_has_one_row_with_finite_numbers(results, name):
    rows = read_rows(results, name)
    timed = [row for row in rows if row["ratio"]]
    columns = EXPECTED[name]
    combinations = [tuple(row[column] for column in columns) for row in timed]
    assert len(combinations) == len(set(combinations)) == math.prod(map(len, columns.values()))
    for column, values in columns.items():
        assert {row[column] for row in timed} == values
    for row in timed:
        numbers = [float(row[column]) for column in NUMBERS]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])
    if name == "relative":  # whose memory is measured
        peaks = [float(row["mib"]) for row in rows if row["mib"]]
        assert len(peaks) == 3
        assert all(0 <= peak < 100 for peak in peaks)


@pytest.mark.slow
def test_hugging_face_table_has_every_family(results):
    rows = read_rows(results, "huggingface")
    variants = {case: {row["variant"] for row in rows if row["case"] == case} for case in HF_CASES}
    assert variants == HF_CASES
    assert all(float(row[column]) > 0 for row in rows for column in NUMBERS)
    table = file_of(results, "huggingface", "md").read_text(encoding="utf-8")
    assert len(re.findall(r"\| \d+ x \d+ \| [\d.]+ \| \d+ \|", table)) == 2


@pytest.mark.slow
def test_speech_tables_have_every_type_and_kind_of_batch(results):
    """Types, batches with and without padding, features."""
    rows = read_rows(results, "speech")
    types = [(row["B x T"], row["variant"]) for row in rows if row["B x T"]]
    assert sorted(types) == sorted((size, name) for size in ("2 x 60", "2 x 90") for name in FEW)
    batches = {row["variant"]: row for row in rows if row["part"] == "batches"}
    assert list(batches) == ["sorted, padded", "perturbed, padded", "padding-free"]
    padding = [float(row["padding_percent"]) for row in batches.values()]
    assert padding[1] >= padding[0] > padding[2] == 0
    for row in rows:
        for column in ("ratio", "frames_per_second", "times_real_time"):
            assert not row[column] or float(row[column]) > 0
    assert sum(row["part"] == "features" for row in rows) == 9


@pytest.mark.slow
def test_vision_table_has_every_type_and_size(results):
    """UniViT, types at two sizes, and images per second at each size."""
    rows = read_rows(results, "vision")
    timed = {(row["case"], row["variant"]) for row in rows if row["ratio"]}
    types = vision.TYPES
    parts = [f"{part}, {size} px" for part in ("training", "embedding layer") for size in (32, 48)]
    expected = {("UniViT", "all 32"), ("UniViT", "UniViT")}
    assert timed == expected | {(part, name) for part in parts for name in types}
    rates = {(row["variant"], row["pixels"]): row["images_per_second"] for row in rows}
    numbers = {key: float(rate) for key, rate in rates.items() if rate}
    assert numbers.keys() == {(name, size) for name in types for size in ("16", "32", "48")}
    assert min(numbers.values()) > 0


@pytest.mark.slow
def test_serving_table_has_every_engine_in_every_case(results):
    """Beam search and greedy search."""
    rows = read_rows(results, "serving")
    cases = [(row["search"], row["variant"]) for row in rows]
    engines = ["fairseq-generate", "Hugging Face generate", "CTranslate2", "CTranslate2 int8"]
    assert cases == [(search, name) for search in ("beam 5", "greedy") for name in engines]
    for row in rows:
        speed = 1000 * int(row["batch"]) * 5 / float(row["milliseconds"])
        assert float(row["tokens_per_second"]) == pytest.approx(speed, rel=1e-2)
    peaks = {row["variant"]: float(row["peak_mib"]) for row in rows if row["peak_mib"] != "nan"}
    assert 0 < peaks["CTranslate2"] < 150


@pytest.mark.slow
def test_whisper_cpp_table_has_every_way_at_every_duration(results):
    """Words, and a recording of one duration for times; transformers writes its own texts."""
    whisper_cpp = pytest.importorskip("benchmarks.whisper_cpp", exc_type=ImportError)
    rows = read_rows(results, "whisper_cpp")
    ways = [whisper_cpp.TRANSFORMERS, *whisper_cpp.ENGINE]
    words, times = ([row for row in rows if row[key]] for key in ("wer", "ratio"))
    durations = [(row["duration"], row["variant"]) for row in words]
    assert durations == [(duration, way) for duration in ("1-3 s", "3-6 s") for way in ways]
    assert all(0 <= float(row["wer"]) < 1000 and int(row["words"]) > 0 for row in words)
    assert [int(row["same"]) for row in words if row["variant"] == ways[0]] == [2, 2]
    assert [(row["duration"], row["variant"]) for row in times] == [("1 s", way) for way in ways]
    assert all(float(row[column]) > 0 for row in times for column in NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_markdown_says_how_to_repeat_it_and_shows_the_plot(results, name):
    if message := run.lacking(name):
        pytest.skip(message)
    path = file_of(results, name, "md")
    text = path.read_text(encoding="utf-8")
    assert f"python -m benchmarks.run {name} --rounds 1 --warm-up 1 --quick" in text
    assert str(results) not in text
    for word in ("**Machine**", "**Versions**", "Python", "torch", "fairseq", "GiB", "Quick run"):
        assert word in text
    plot = path.with_suffix(".png")
    assert f"({plot.name})" in text
    assert plot.exists()
    assert plot.read_bytes().startswith(b"\x89PNG") == (name == "relative")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "unknown benchmark 'speed'; choose from embedding"),
        (["serving", "--dtype", "float16"], "serving takes no --device and no --dtype"),
        (["--device", "cuda", "--clock", "cpu"], "--clock cpu cannot see the time of a GPU"),
    ],
)
def test_bad_arguments_are_refused(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit):
        run.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_what_runs_on_a_cpu_only_is_left_out_elsewhere(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert run.parse_arguments([]).names == list(run.BENCHMARKS)
    names = run.parse_arguments(["--device", "cuda"]).names
    assert names == [name for name in run.BENCHMARKS if name not in ("serving", "whisper_cpp")]


def test_what_needs_a_package_that_is_missing_is_refused_or_left_out(monkeypatch, capsys):
    """Refused where it is asked for by name, left out of all."""
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run.parse_arguments(["whisper_cpp"])
    message = "whisper_cpp needs pywhispercpp: pip install pywhispercpp"
    assert message in capsys.readouterr().err
    monkeypatch.setattr(run, "BENCHMARKS", {"whisper_cpp": "whisper_cpp:run"})
    run.main([])
    logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == f"left out: {message}\n"


def test_quick_results_do_not_replace_the_committed_ones():
    assert run.parse_arguments(["--quick"]).output != run.RESULTS == run.parse_arguments([]).output


def test_ratio_is_to_both_runs_of_the_reference_in_the_same_round(monkeypatch):
    """A machine that becomes slower from round to round: times differ, ratios do not."""
    now, slower = [0.0], [1.0]

    def take(seconds: float) -> measure.Step:
        def step() -> None:
            slower[0] *= 1.0001
            now[0] += seconds * slower[0]

        return step

    monkeypatch.setitem(measure.CLOCKS, "wall", lambda: now[0])
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # looks at all that is imported
    steps = {"reference": take(2.0), "same": take(2.0), "double": take(4.0)}
    timings = measure.interleave(steps, SETUP, 0.0, "test")
    assert list(timings) == list(steps)
    for name, ratio in {"reference": 1.0, "same": 1.0, "double": 2.0}.items():
        assert timings[name].ratio == pytest.approx(ratio, rel=1e-3)
        assert timings[name].low <= timings[name].ratio <= timings[name].high
    assert timings["double"].rounds >= measure.MIN_ROUNDS


def test_models_share_what_they_have_in_common():
    task = hosts.make_task(50)
    stock, cape = (
        hosts.make_model(task, positions, SETUP, **hosts.TINY)
        for positions in ({}, {"position_embedding": "relpos"})
    )
    assert stock.encoder.embed_tokens.weight is not cape.encoder.embed_tokens.weight
    distinct = hosts.share_parameters([stock, cape])
    stock_names = {name for name, _ in stock.named_parameters()}
    new_names = {name for name, _ in cape.named_parameters()} - stock_names
    assert new_names
    assert all(".relative." in name for name in new_names)
    assert len(distinct) == len(stock_names) + len(new_names)
    for name, parameter in stock.named_parameters():
        assert cape.get_parameter(name) is parameter


def test_every_type_is_measured():
    assert hosts.variants().keys() >= TYPES.keys()
    assert embedding.types() == [n for n, row in TYPES.items() if ENCODINGS[row.encoding].adds]


def test_memory_of_a_tensor_is_counted_once():
    before, peak = peak_resident(lambda: torch.ones(64, 2**18))
    assert 63 < peak - before < 80
