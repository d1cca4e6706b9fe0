"""The rows of the shoot-out: types, questions and tasks. A new task is a row of :data:`TASKS`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ROPE_SHIFT, ROPE_SCALE = "rope:max_local_shift=0.5", "rope:max_local_shift=0.5,max_global_scale=2"
# Types as the recipes take them after --compare, and their names on the page
TYPES = {
    "nopos": "nopos",
    "sinpos": "sinpos",
    "abspos": "abspos",
    "relpos": "relpos",
    "rope": "rope",
    ROPE_SHIFT: "rope+shift",
    ROPE_SCALE: "rope+shift+scale",
    "alibi": "alibi",
    "fire": "fire",
    "shape": "shape",
    "cape": "cape",
    "randpos": "randpos",
    "rfs": "rfs",
}

SAME, TWICE, FOUR, EIGHT, SMALLER, LARGER = (
    "as long as in training",
    "about twice as long",
    "about four times as long",
    "eight times as long and more",
    "smaller images",
    "larger images",
)
QUESTIONS = (SAME, TWICE, FOUR, EIGHT, SMALLER, LARGER)
BUDGETS = ("none", "1h", "6h", "full")


@dataclass(frozen=True)
class Task:
    """One training and test of each type.

    Args:
        name: Name in tables, options and folders.
        family: Tasks of one family count as one task where types are compared over all tasks.
        metric: What is measured, with its unit.
        command: Module and options after ``python -m``, in which ``{files}`` stands for `files`.
            The program adds ``--compare``, ``--seeds`` and what `shared` names.
        table: Table that the command writes, below its ``--output``, or else its ``--work``.
        type_column, group_column, value_column: Columns of the table. The group may have several
            names, because published tables are put together of several tables.
        tests: Groups of tests by question; the value of a question is the mean of its groups.
        lengths: What the groups are, and the lengths of training.
        seconds: CPU seconds of one training, about.
        seeds: Seeds by budget; none for a budget that is missing.
        shared: The command's options of side-by-side trainings, finished work and results.
        lower_is_better: Whether the metric is an error.
        words: The command's word of a type, where it differs.
        rows: Row of a type in the published tables, where the row is not this word.
        without: Types that the models of the task do not have, and why.
        pages: Published tables and pages, see :func:`recipes.shootout.cells.published`.
        files: Name of the option that gives the data, if none are built in.
        note: Settings that a reader has to know.
    """

    name: str
    family: str
    metric: str
    command: str
    tests: Mapping[str, tuple[str, ...]]
    lengths: str
    seconds: int
    seeds: Mapping[str, tuple[int, ...]]
    group_column: tuple[str, ...]
    value_column: str
    type_column: str = "variant"
    table: str = "scores.csv"
    shared: tuple[str, ...] = ("jobs", "work", "output")
    lower_is_better: bool = True
    words: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    rows: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    without: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    pages: tuple[tuple[str, str], ...] = ()
    files: str = ""
    note: str = ""

    def word(self, type_name: str) -> str:
        """The type as the command of this task takes it."""
        return self.words.get(type_name, type_name)

    def row(self, type_name: str) -> str:
        """The type as the published tables of this task name it."""
        return self.rows.get(type_name, self.word(type_name))

    def types(self) -> tuple[str, ...]:
        """The types that the models of this task have."""
        return tuple(name for name in TYPES if name not in self.without)


THREE = (1, 2, 3)
# Seeds by budget. One seed has no rank, so a budget has two seeds of a task or more, or none; the
# lists, the longest training of the first budget, are the exception.
CONTROL = {"1h": THREE, "6h": THREE, "full": THREE}
LISTS = {"1h": (1,), "6h": THREE, "full": THREE}
MEDIUM = {"6h": (1, 2), "full": THREE}
LARGE = {"full": THREE}

# In encoders a bias without direction cannot tell what is before from what is after.
DIRECTED = {"alibi": "alibi:directed=true"}
# Models of stock rotary families have `rope` as their stock type; their `cape` augments it.
AUGMENTED_ROPE = {ROPE_SHIFT: "cape", ROPE_SCALE: "cape:max_global_scale=2"}
ON_A_GRID = dict.fromkeys(("randpos", "rfs"), "the type needs a sequence, not a grid")
NOT_ROTARY = dict.fromkeys(
    ("sinpos", "abspos", "relpos", "alibi", "fire", "shape", "cape"),
    "models with rotary positions have no such type",
)
DECODER_ROWS = ("nopos", "sinpos", "relpos", "cape", "rope", "alibi", "fire")  # of the study

CONTROL_GROUP = ("size", "length (s)", "length (tokens)", "side (patches)")
BYTES = "--train-length 128 --test-lengths 64 128 192 256 384 512 768 1024"
POSITIONS = {SAME: ("64-127",), TWICE: ("192-255",), FOUR: ("384-511",), EIGHT: ("768-1023",)}
POSITION_LENGTHS = "positions in bytes; trained on blocks of 128"
DURATIONS = {SAME: ("1-2 s",), TWICE: ("4-8 s",), FOUR: ("8-16 s",), EIGHT: ("over 16 s",)}
DURATION_LENGTHS = (
    "seconds; trained on recordings up to 2.5 s, so 4-8 s are 1.6 to 3.2 times as long, 8-16 s 3.2 "
    "to 6.4 times"
)
PHOTOS = {  # what all tasks of photos share
    "family": "photos",
    "metric": "accuracy",
    "seeds": LARGE,
    "group_column": ("image size",),
    "value_column": "accuracy",
    "shared": ("output",),
    "lower_is_better": False,
    "without": ON_A_GRID,
    "files": "images",
}
TASKS = (
    Task(
        "control-audio",
        "control",
        "wrong labels, %",
        "cape_plugins demo --domain audio",
        {SAME: ("4",), TWICE: ("8",), FOUR: ("16",), EIGHT: ("32", "64")},
        "seconds; trained on 4",
        seconds=8,
        seeds=CONTROL,
        group_column=CONTROL_GROUP,
        value_column="error_percent",
        type_column="type",
        shared=("jobs", "output"),
        words=DIRECTED,
        pages=(("demo-scores.csv", "demo-types/scores.md"),),
        note="`cape` has a shift of 30 s, which covers all lengths",
    ),
    Task(
        "control-text",
        "control",
        "wrong labels, %",
        "cape_plugins demo --domain text",
        {SAME: ("40",), TWICE: ("80",), FOUR: ("160",), EIGHT: ("320",)},
        "tokens; trained on 40",
        seconds=10,
        seeds=CONTROL,
        group_column=CONTROL_GROUP,
        value_column="error_percent",
        type_column="type",
        shared=("jobs", "output"),
        words=DIRECTED,
        pages=(("demo-scores.csv", "demo-text-types/scores.md"),),
        note="`cape` has a shift that covers all lengths",
    ),
    Task(
        "control-image",
        "control",
        "wrong labels, %",
        "cape_plugins demo --domain image",
        {SAME: ("8",), SMALLER: ("4",), LARGER: ("12", "16", "24", "32")},
        "patches on a side; trained on 8",
        seconds=20,
        seeds=CONTROL,
        group_column=CONTROL_GROUP,
        value_column="error_percent",
        type_column="type",
        shared=("jobs", "output"),
        without=ON_A_GRID,
        pages=(
            ("demo-scores.csv", "demo-image/scores.md"),
            ("demo-scores.csv", "demo-image-types/scores.md"),
        ),
    ),
    Task(
        "lists",
        "number lists",
        "right lists, share",
        "recipes.mt.quickstart --updates 2000 --first-look 0",
        {SAME: ("4",), TWICE: ("6", "8")},
        "numbers; trained on 1 to 4, so 6 are 1.5 times as long",
        seconds=340,
        seeds=LISTS,
        group_column=("length",),
        value_column="exact_match",
        lower_is_better=False,
        words=DIRECTED,
        pages=(("quickstart/scores.csv", ""),),
        note="`cape` has a shift that reaches the longest lists; `shape` has independent offsets",
    ),
    Task(
        "copies",
        "copies",
        "right tokens, share",
        "recipes.lm.finetune_hf --task copy",
        {SAME: ("5",), TWICE: ("10",), FOUR: ("20",)},
        "letters; trained on 1 to 5",
        seconds=60,
        seeds=CONTROL,
        group_column=("length",),
        value_column="token_accuracy",
        shared=("output",),
        lower_is_better=False,
        words=AUGMENTED_ROPE,
        without=NOT_ROTARY,
        pages=(("lm-exercises.csv", "lm-copy/scores.md"),),
    ),
    Task(
        "lm-fairseq",
        "language models",
        "loss, nats per byte",
        f"recipes.lm.run {{files}} {BYTES} --updates 3000",
        POSITIONS,
        POSITION_LENGTHS,
        seconds=130,
        seeds=MEDIUM,
        group_column=("position",),
        value_column="loss",
        pages=(
            ("lm-fairseq/scores.csv", ""),
            ("lm-losses.csv", "lm-fairseq-types/scores.md"),
        ),
        files="texts",
        note="`cape` has a shift of 896, which covers all lengths; `fire` was trained on another "
        "machine, where `alibi` differs by at most 0.02 (one seed)",
    ),
    Task(
        "lm-rotary",
        "language models",
        "loss, nats per byte",
        f"recipes.lm.finetune_hf --task text {{files}} {BYTES}",
        POSITIONS,
        POSITION_LENGTHS,
        seconds=400,
        seeds=LARGE,
        group_column=("position",),
        value_column="loss",
        shared=("output",),
        words=AUGMENTED_ROPE,
        without=NOT_ROTARY,
        pages=(("lm-losses.csv", "lm-multi30k/scores.md"),),
        files="texts",
    ),
    Task(
        "digits-ctc",
        "digits",
        "wrong words, %",
        "recipes.asr.run",
        DURATIONS,
        DURATION_LENGTHS,
        seconds=100,
        seeds=MEDIUM,
        group_column=("duration",),
        value_column="wer",
        type_column="model",
        words=DIRECTED,
        pages=(("asr-scores.csv", "asr-types/scores.md"),),
        note="digits can be read without positions",
    ),
    Task(
        "digits-decoder",
        "digits",
        "wrong words, %",
        "recipes.asr.run --study decoder --updates 1000",
        DURATIONS,
        DURATION_LENGTHS,
        seconds=300,
        seeds=LARGE,
        group_column=("duration",),
        value_column="wer",
        type_column="model",
        words={name: f"decoder-{name}" for name in DECODER_ROWS},
        without={
            name: "the recipe of decoders does not have the type"
            for name in TYPES
            if name not in DECODER_ROWS
        },
        pages=(("asr-scores.csv", "asr-decoder/scores.md"),),
        note="the types are of the encoder; all decoders have `relpos`",
    ),
    Task(
        "phones",
        "phones",
        "wrong frames, %",
        "recipes.phones.run --optimizer adamw --batch-size 16 --train-length 0.6 "
        "--test-lengths 2.5 10 30 --test-size 500",
        {SAME: ("0.6000",), FOUR: ("2.5000",), EIGHT: ("10.0000", "30.0000")},
        "seconds; trained on 0.6",
        seconds=120,
        seeds=MEDIUM,
        group_column=("seconds",),
        value_column="per",
        type_column="type",
        table="lengths.csv",
        shared=("work", "output"),
        words=DIRECTED,
        pages=(("phones-lengths.csv", "phones-adamw/results.md"),),
        note="with a shift of 10 s `cape` has fewer errors at 2.5 s than here",
    ),
    Task(
        "captions",
        "captions",
        "BLEU of stacked captions",
        "recipes.mt.run multi30k_study prepare train select analyze {files}",
        {SAME: ("1",), TWICE: ("2",), FOUR: ("4",)},
        "captions in a row; trained on one",
        seconds=1200,
        seeds=LARGE,
        group_column=("sentences",),
        value_column="bleu",
        type_column="model",
        table="analysis/length-stacked.csv",
        shared=("jobs", "work"),
        lower_is_better=False,
        words=DIRECTED,
        # trained beside `rope`, `alibi` and `fire`, on one machine
        rows={"relpos": "relpos, again", "alibi": "alibi"},
        pages=(
            ("multi30k-length-stacked.csv", "multi30k-study/length-stacked.md"),
            ("multi30k-length-stacked.csv", "multi30k-study-types/length-stacked.md"),
        ),
        files="captions",
        note="the default shift of `cape`; a shift of ten reaches 7.8 on four captions; in the "
        "published tables `alibi` has no direction; `rope`, `alibi`, `fire` and `relpos, again` "
        "were trained on one machine, the other types on another, where `relpos` reaches 28.9, "
        "17.3 and 8.6: such differences may change ranks between the machines",
    ),
    Task(
        "cifar10",
        command="recipes.vit.finetune_hf {files} --recipe cifar10",
        tests={SAME: ("32",), SMALLER: ("16", "20", "24", "28"), LARGER: ("40", "48", "64")},
        lengths="pixels; trained on 32",
        seconds=120,
        pages=(("image-scores.csv", "cifar10/scores.md"),),
        note="with a shift of 0.1 `cape` reaches 0.43 at 32 and at 64 pixels",
        **PHOTOS,
    ),
    Task(
        "cifar10-univit",
        command="recipes.vit.finetune_hf {files} --recipe cifar10 --univit",
        tests={SAME: ("16", "20", "24", "28", "32", "40", "48"), LARGER: ("64",)},
        lengths="pixels; trained on 16, 24, 32, 40 and 48",
        seconds=120,
        pages=(("image-scores.csv", "cifar10-univit/scores.md"),),
        **PHOTOS,
    ),
    Task(
        "cifar10-fine",
        command="recipes.vit.finetune_hf {files} --recipe cifar10-fine",
        tests={SAME: ("32",), SMALLER: ("20", "24", "28"), LARGER: ("40", "48", "64")},
        lengths="pixels; trained on 32",
        seconds=900,
        pages=(("image-scores.csv", "cifar10-fine/scores.md"),),
        note="`cape` reaches 0.44 at 32 pixels if a quarter of the images is augmented; `rope`, "
        "`alibi` and `fire` were trained on other images, where `sinpos` reaches 0.45",
        **PHOTOS,
    ),
    Task(
        "cifar10-fine-univit",
        command="recipes.vit.finetune_hf {files} --recipe cifar10-fine --univit "
        "--train-sizes 16 24 32 40",
        tests={SAME: ("20", "24", "28", "32", "40"), LARGER: ("48", "64")},
        lengths="pixels; trained on 16, 24, 32 and 40",
        seconds=900,
        pages=(("image-scores.csv", "cifar10-fine-univit/scores.md"),),
        **PHOTOS,
    ),
)
