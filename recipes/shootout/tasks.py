"""The rows of the shoot-out: types, questions and tasks. A new task is a row of :data:`TASKS`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ROPE_SHIFT, ROPE_SCALE = (
    "rope:max_local_shift=0.5",
    "rope:max_local_shift=0.5,max_global_scale=1.4",
)
# Types as the recipes take them after --compare
TYPES = (
    "nopos",
    "sinpos",
    "abspos",
    "relpos",
    "rope",
    ROPE_SHIFT,
    ROPE_SCALE,
    "alibi",
    "fire",
    "shape",
    "cape",
    "randpos",
    "rfs",
)

# Names on the page
LABELS = {ROPE_SHIFT: "rope+shift", ROPE_SCALE: "rope+shift+scale"}

SAME, TWICE, BEYOND, SIZES = (
    "nothing longer than in training",
    "up to twice as long",
    "four times as long and more",
    "images of other sizes",
)
QUESTIONS = (SAME, TWICE, BEYOND, SIZES)
BUDGETS = ("none", "1h", "6h", "full")


@dataclass(frozen=True)
class Task:
    """One training and test of each type.

    Args:
        name: Name in tables and options.
        metric: What is measured, with its unit.
        command: Module and options after ``python -m``, in which ``{files}`` stands for `files`.
            The program adds ``--compare``, ``--seeds`` and what `shared` names.
        table: Table that the command writes, below its ``--output``, or else its ``--work``.
        columns: Names of the columns with the type, the group of tests, and the value. The group
            may have several names, because published tables are put together of several tables.
        tests: Groups of tests by question; the value of a question is the mean of its groups.
        seconds: CPU seconds of one training, about, on the machine of the published tables.
        seeds: Seeds by budget; none for a budget that is missing.
        shared: The command's options of side-by-side trainings, finished work and results.
        lower_is_better: Whether the metric is an error.
        words: The command's word of a type, where it differs.
        without: Types that the models of the task do not have, and why.
        pages: Published tables by their path below ``docs/results`` and page; see
            :func:`recipes.shootout.cells.published`.
        files: Name of the option that gives the data, if none are built in.
    """

    name: str
    metric: str
    command: str
    table: str
    columns: tuple[str, str | tuple[str, ...], str]
    tests: Mapping[str, tuple[str, ...]]
    seconds: int
    seeds: Mapping[str, tuple[int, ...]]
    shared: tuple[str, ...] = ("jobs", "work", "output")
    lower_is_better: bool = True
    words: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    without: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    pages: tuple[tuple[str, str], ...] = ()
    files: str = ""

    def word(self, type_name: str) -> str:
        """The type as the command and the table of this task write it."""
        return self.words.get(type_name, type_name)

    def types(self) -> tuple[str, ...]:
        """The types that the models of this task have."""
        return tuple(name for name in TYPES if name not in self.without)


THREE, ONE = (1, 2, 3), (1,)
# Seeds by budget; small models get a seed more with more time.
ALWAYS = {"1h": THREE, "6h": THREE, "full": THREE}
SMALL = {"1h": ONE, "6h": (1, 2), "full": THREE}
MEDIUM = {"6h": ONE, "full": THREE}
LARGE = {"full": THREE}

# In encoders a bias without direction cannot tell what is before from what is after.
DIRECTED = {"alibi": "alibi:directed=true"}
# Models of stock rotary families have `rope` as their stock type; their `cape` augments it.
AUGMENTED_ROPE = {ROPE_SHIFT: "cape", ROPE_SCALE: "cape:max_global_scale=2"}
ON_A_GRID = dict.fromkeys(("randpos", "rfs"), "draws positions of a sequence")
NOT_ROTARY = dict.fromkeys(
    ("sinpos", "abspos", "relpos", "alibi", "fire", "shape", "cape"),
    "the stock models have rotary positions",
)
DECODER_ROWS = ("nopos", "sinpos", "relpos", "cape")  # of the study

DEMO_GROUPS = ("size", "length (s)", "length (tokens)", "side (patches)")
DEMO = ("type", DEMO_GROUPS, "error_percent")
VARIANT_BY_LENGTH = ("variant", "length", "exact_match")
LOSSES = ("variant", "position", "loss")
WORDS_WRONG = ("model", "duration", "wer")
ACCURACY = ("variant", "image size", "accuracy")

BYTES = "--train-length 128 --test-lengths 64 128 192 256 384 512 768 1024"
POSITIONS = {
    SAME: ("64-127",),
    TWICE: ("192-255",),
    BEYOND: ("384-511", "512-767", "768-1023"),
}
DURATIONS = {SAME: ("1-2 s",), TWICE: ("4-8 s",), BEYOND: ("8-16 s", "over 16 s")}
TASKS = (
    Task(
        "control, audio",
        "wrong labels, %",
        "cape_plugins demo --domain audio",
        "scores.csv",
        DEMO,
        {SAME: ("4",), TWICE: ("8",), BEYOND: ("16", "32", "64")},
        seconds=8,
        seeds=ALWAYS,
        shared=("jobs", "output"),
        words=DIRECTED,
        pages=(("demo-scores.csv", "demo-types/scores.md"),),
    ),
    Task(
        "control, text",
        "wrong labels, %",
        "cape_plugins demo --domain text",
        "scores.csv",
        DEMO,
        {SAME: ("40",), TWICE: ("80",), BEYOND: ("160", "320")},
        seconds=10,
        seeds=ALWAYS,
        shared=("jobs", "output"),
        words=DIRECTED,
        pages=(("demo-scores.csv", "demo-text-types/scores.md"),),
    ),
    Task(
        "control, images",
        "wrong labels, %",
        "cape_plugins demo --domain image",
        "scores.csv",
        DEMO,
        {SAME: ("8",), SIZES: ("4", "12", "16", "24", "32")},
        seconds=20,
        seeds=ALWAYS,
        shared=("jobs", "output"),
        without=ON_A_GRID,
        pages=(
            ("demo-scores.csv", "demo-image/scores.md"),
            ("demo-scores.csv", "demo-image-types/scores.md"),
        ),
    ),
    Task(
        "number lists",
        "lists that are right, share",
        "recipes.mt.quickstart --updates 2000 --first-look 0",
        "scores.csv",
        VARIANT_BY_LENGTH,
        {SAME: ("4",), TWICE: ("6", "7", "8")},
        seconds=340,
        seeds=SMALL,
        lower_is_better=False,
        words=DIRECTED,
        pages=(("quickstart/scores.csv", ""),),
    ),
    Task(
        "copies",
        "tokens that are right, share",
        "recipes.lm.finetune_hf --task copy",
        "scores.csv",
        ("variant", "length", "token_accuracy"),
        {SAME: ("5",), TWICE: ("8", "10"), BEYOND: ("20",)},
        seconds=60,
        seeds=SMALL,
        shared=("output",),
        lower_is_better=False,
        words=AUGMENTED_ROPE,
        without=NOT_ROTARY,
        pages=(("lm-exercises.csv", "lm-copy/scores.md"),),
    ),
    Task(
        "language model of fairseq",
        "loss, nats per byte",
        f"recipes.lm.run {{files}} {BYTES} --updates 3000",
        "scores.csv",
        LOSSES,
        POSITIONS,
        seconds=130,
        seeds=MEDIUM,
        words={ROPE_SCALE: f"{ROPE_SHIFT},max_global_scale=2"},
        pages=(
            ("lm-fairseq/scores.csv", ""),
            ("lm-losses.csv", "lm-fairseq-types/scores.md"),
        ),
        files="texts",
    ),
    Task(
        "rotary language model",
        "loss, nats per byte",
        f"recipes.lm.finetune_hf --task text {{files}} {BYTES}",
        "scores.csv",
        LOSSES,
        POSITIONS,
        seconds=400,
        seeds=LARGE,
        shared=("output",),
        words=AUGMENTED_ROPE,
        without=NOT_ROTARY,
        pages=(("lm-losses.csv", "lm-multi30k/scores.md"),),
        files="texts",
    ),
    Task(
        "digits, CTC",
        "wrong words, %",
        "recipes.asr.run",
        "scores.csv",
        WORDS_WRONG,
        DURATIONS,
        seconds=100,
        seeds=MEDIUM,
        words=DIRECTED,
        pages=(("asr-scores.csv", "asr-types/scores.md"),),
    ),
    Task(
        "digits, decoder",
        "wrong words, %",
        "recipes.asr.run --study decoder --updates 1000",
        "scores.csv",
        WORDS_WRONG,
        DURATIONS,
        seconds=300,
        seeds=LARGE,
        words={name: f"decoder-{name}" for name in DECODER_ROWS},
        without={
            name: "the study of decoders has no such row"
            for name in TYPES
            if name not in DECODER_ROWS
        },
        pages=(("asr-scores.csv", "asr-decoder/scores.md"),),
    ),
    Task(
        "phones",
        "wrong frames, %",
        "recipes.phones.run --optimizer adamw --batch-size 16 --train-length 0.6 "
        "--test-lengths 2.5 10 30 --test-size 500",
        "lengths.csv",
        ("type", "seconds", "per"),
        {SAME: ("0.6000",), BEYOND: ("2.5000", "10.0000", "30.0000")},
        seconds=120,
        seeds=MEDIUM,
        shared=("work", "output"),
        words=DIRECTED,
        pages=(("phones-lengths.csv", "phones-adamw/results.md"),),
    ),
    Task(
        "captions",
        "BLEU of stacked captions",
        "recipes.mt.run multi30k_study prepare train select analyze {files}",
        "analysis/length-stacked.csv",
        ("model", "sentences", "bleu"),
        {SAME: ("1",), TWICE: ("2",), BEYOND: ("4", "6")},
        seconds=1200,
        seeds=LARGE,
        shared=("jobs", "work"),
        lower_is_better=False,
        words=DIRECTED,
        pages=(
            ("multi30k-length-stacked.csv", "multi30k-study/length-stacked.md"),
            ("multi30k-length-stacked.csv", "multi30k-study-types/length-stacked.md"),
        ),
        files="captions",
    ),
    Task(
        "CIFAR-10",
        "accuracy",
        "recipes.vit.finetune_hf {files} --recipe cifar10-fine",
        "scores.csv",
        ACCURACY,
        {SAME: ("32",), SIZES: ("20", "24", "40", "48", "64")},
        seconds=900,
        seeds=LARGE,
        shared=("output",),
        lower_is_better=False,
        without=ON_A_GRID,
        pages=(("image-scores.csv", "cifar10-fine/scores.md"),),
        files="images",
    ),
    Task(
        "CIFAR-10, UniViT",
        "accuracy",
        "recipes.vit.finetune_hf {files} --recipe cifar10-fine --univit --train-sizes 16 24 32 40",
        "scores.csv",
        ACCURACY,
        {SAME: ("24", "32", "40"), SIZES: ("20", "28", "48", "64")},
        seconds=900,
        seeds=LARGE,
        shared=("output",),
        lower_is_better=False,
        without=ON_A_GRID,
        pages=(("image-scores.csv", "cifar10-fine-univit/scores.md"),),
        files="images",
    ),
)
