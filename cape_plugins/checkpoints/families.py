"""Families of models as rows of data: where each family keeps settings, and where positions are.

A row describes stored settings, which are read without the host: the config.json of transformers,
or the arguments of fairseq. :func:`add_family_row` adds a row for models outside this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cape_plugins.checkpoints.generated import GENERATED, GeneratedRow, Variant, row_for
from cape_plugins.settings.domains import HOP_SECONDS, WINDOW_SECONDS

Settings = Mapping[str, Any]
Number = float | Callable[[Settings], float]  # a constant, or a function of the stored settings

OWN_PREFIX = "cape_"  # prefix that turns a stock model type into the model type of this package
FIELD = "position_embedding"
# Settings of the decoder of fairseq's speech models, and prefix of its flags.
DECODER_FIELD = "position_decoder"
FIRST_TOKEN = 2.0  # coordinate: fairseq's padding_idx + 1
SIDES = ("encoder", "decoder")


@dataclass(frozen=True)
class Side:
    """The position embedding of one side (encoder or decoder) of a model.

    Attributes:
        domain: Key of :data:`~cape_plugins.DOMAINS`.
        architecture: Architecture of the side's :class:`~cape_plugins.PositionConfig`.
        dim: Key of the width K among the stored settings; a dot leads into a part of the settings.
            None where no embeddings are added, or where the stock table tells the width.
        field: Key of the position settings; None if they are stored beside other settings, as
            flags.
        start: Coordinate of the first position.
        spacing: Distance of neighbouring positions in the unit of the domain, such as seconds.
        unit: Distance that the model counts as 1, in the unit of the domain.
        frequencies: Frequencies of the sinusoids; None for the frequencies of the domain.
        layout: Order of the channels of sinusoids.
        table: End of the name of a learned table.
        table_first: Number of rows of the table before the first position, for padding or a class
            token.
        grid: Sizes of the training inputs; for images (height, width) in patches.
        default: Default type of a side other than the main side; None for the type of the main
            side.
    """

    domain: str
    architecture: str
    dim: str | None = "d_model"
    field: str | None = FIELD
    start: Number = 0.0
    spacing: Number = 1.0
    unit: Number = 1.0
    frequencies: str | None = None
    layout: str = "sin_cos_blocks"
    table: str = "positions.encoding.weight"
    table_first: int = 0
    grid: Callable[[Settings], tuple[int, ...]] | None = None
    default: str | None = None


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        model_type: Type of the stock model.
        sides: The position embedding of "encoder" and "decoder", the main side first.
        stock: Type of position embedding of the stock model, or a function of settings and side;
            None if there is no stock model.
        parts: First parts of parameter names by which this family is recognised (fairseq).
        keeps_borders: Whether this package has to keep packed texts apart, because attention of
            the stock model crosses the borders between the texts.
        variant: The second kind of stock models of this model type; None if all are of one kind.
    """

    model_type: str
    sides: Mapping[str, Side]
    stock: str | Callable[[Settings, str], str] | None = None
    parts: tuple[str, ...] = ()
    keeps_borders: bool = False
    variant: Variant | None = None

    def stock_type(self, settings: Settings, side: str) -> str | None:
        """Type of position embedding of one side of the stock model with these settings."""
        return self.stock(settings, side) if callable(self.stock) else self.stock


FAMILY_ROWS: dict[str, Family] = {}


def add_family_row(row: Family) -> None:
    """Adds or replaces the row of a stock model type of transformers."""
    FAMILY_ROWS[row.model_type] = row


def find_family(model_type: str, settings: Settings | None = None) -> Family | None:
    """The row of a model type; None for an unknown type.

    Args:
        model_type: With or without the prefix ``cape_``.
        settings: Settings of a model, which tell the kind of the model. Without settings, the row
            of the first kind; sides, their fields and their domains are the same for both kinds.
    """
    family = FAMILY_ROWS.get(model_type.removeprefix(OWN_PREFIX))
    return family if family is None or settings is None else row_for(family, settings)


def known_types(prefix: str = "") -> str:
    """The model types that have a row, for messages; of the many generated types only the number.

    Args:
        prefix: Put before each type.
    """
    names = [prefix + name for name in FAMILY_ROWS if name not in GENERATED]
    generated = f"{len(GENERATED)} types of cape_plugins.checkpoints.generated"
    return f"{', '.join(names)}, and the {generated}, such as {prefix}{next(iter(GENERATED))}"


def setting_of(name: str, settings: Any) -> Any:
    """A setting by its name, such as "d_model" or "vision_config.hidden_size".

    Args:
        name: Attribute of a configuration, or key of a stored configuration; a dot leads into a
            part of the configuration.
        settings: The configuration, or the stored configuration.

    Raises:
        AttributeError, KeyError: if there is no such setting.
    """
    for part in name.split("."):
        is_stored = isinstance(settings, Mapping)
        settings = settings[part] if is_stored else getattr(settings, part)
    return settings


def width_of(row: Side, settings: Any) -> int:
    """K of a side; 0 where nothing of this width is added. For errors see :func:`setting_of`."""
    return 0 if row.dim is None else setting_of(row.dim, settings)


def value_of(value: Number, settings: Settings) -> float:
    """The number that a row gives for a model with these settings."""
    return value(settings) if callable(value) else value


# ---- transformers ------------------------------------------------------------------------------


def _patches(settings: Settings) -> tuple[int, int]:
    """Rows and columns; sizes are numbers or [height, width]."""
    sizes = (settings["image_size"], settings["patch_size"])
    pairs = [size if isinstance(size, list | tuple) else [size, size] for size in sizes]
    return tuple(side // step for side, step in zip(*pairs, strict=True))


def _hop(settings: Settings) -> float:
    return settings.get("hop_seconds", HOP_SECONDS)


def _after_padding(settings: Settings) -> float:
    return settings["pad_token_id"] + 1  # coordinate of the first token, as in fairseq


def _steps(settings: Settings) -> float:
    """Seconds between outputs of Speech2Text's convolutions, each of which has stride 2."""
    return _hop(settings) * 2 ** settings["num_conv_layers"]


def _encoder(domain: str, **settings: Any) -> Side:
    return Side(domain=domain, architecture="encoder", **settings)


def _seq2seq(**settings: Any) -> dict[str, Side]:
    return dict.fromkeys(SIDES, Side(domain="text", architecture="seq2seq", **settings))


_MARIAN = _seq2seq(frequencies="marian")
_BART = _seq2seq(table="embed_positions.weight", table_first=2)
_M2M100 = _seq2seq(start=_after_padding, frequencies="fairseq")
for _name, _sides, _stock in (
    ("marian", _MARIAN, "sinpos"),
    ("pegasus", _MARIAN, "sinpos"),
    ("m2m_100", _M2M100, "sinpos"),
    ("bart", _BART, "abspos"),
    ("mbart", _BART, "abspos"),
):
    add_family_row(Family(_name, _sides, _stock))
_BERT = _encoder("text", dim="hidden_size", table="position_embeddings.weight")
add_family_row(Family("bert", {"encoder": _BERT}, "abspos"))


def add_generated_row(model_type: str, row: GeneratedRow) -> None:
    """Adds or replaces a generated family, for this process.

    Args:
        model_type: Model type of the stock model.
        row: See :class:`~cape_plugins.checkpoints.generated.GeneratedRow`.
    """
    GENERATED[model_type] = row
    add_family_row(_generated_family(model_type, row))


def _generated_family(model_type: str, row: GeneratedRow) -> Family:
    sides = {row.side: Side(domain=row.domain, architecture=row.architecture, dim=None)}
    if (tower := row.tower) is not None:
        field = f"{tower.side}_{FIELD}"
        sides[tower.side] = Side(
            domain=tower.domain,
            architecture=tower.architecture,
            dim=None,
            field=field,
            default=tower.stock,
        )
    variant = row.variant
    if variant is not None:
        variant = replace(variant, row=_generated_family(model_type, variant.row))
    return Family(
        model_type,
        sides,
        lambda settings, side: row_for(row, settings).sides[side].stock,
        keeps_borders=row.keeps_borders,
        variant=variant,
    )


def remove_generated_row(model_type: str) -> None:
    """Removes a generated family, for this process."""
    del GENERATED[model_type], FAMILY_ROWS[model_type]


for _name, _row in GENERATED.items():
    add_generated_row(_name, _row)


def _image(special_tokens: int, table: str = "position_embeddings") -> dict[str, Side]:
    return {
        "encoder": _encoder(
            "image",
            dim="hidden_size",
            layout="cos_sin_interleaved",
            table=table,
            table_first=special_tokens,
            grid=_patches,
        )
    }


def _stock_beit(settings: Settings, side: str) -> str:
    return "abspos" if settings.get("use_absolute_position_embeddings") else "nopos"


add_family_row(Family("vit", _image(1), "abspos"))
add_family_row(Family("deit", _image(2), "abspos"))
add_family_row(Family("dinov2", _image(1), "abspos"))
add_family_row(Family("dinov2_with_registers", _image(1), "abspos"))
add_family_row(Family("beit", _image(1), _stock_beit))
add_family_row(Family("siglip_vision_model", _image(0, "position_embedding.weight"), "abspos"))
_SPEECH_CTC = _encoder(
    "audio",
    start=lambda settings: settings.get("window_seconds", WINDOW_SECONDS) / 2,
    spacing=lambda settings: _hop(settings) * settings["conv_stride"],
)
add_family_row(Family("speech_ctc", {"encoder": _SPEECH_CTC}))
add_family_row(
    Family(
        "speech_to_text",
        {
            "encoder": _encoder(
                "audio",
                start=_after_padding,
                spacing=_steps,
                unit=_steps,
                frequencies="fairseq",
            ),
            "decoder": Side(
                domain="text",
                architecture="decoder",
                field=f"decoder_{FIELD}",
                start=_after_padding,
                frequencies="fairseq",
            ),
        },
        "sinpos",
    )
)
_WHISPER_STEP = 0.02  # seconds between positions of the stock encoder: hop of 10 ms, stride 2
_WHISPER_DECODER = "abspos"
add_family_row(
    Family(
        "whisper",
        {
            "encoder": _encoder(
                "audio",
                spacing=lambda settings: 2 * _hop(settings),
                unit=_WHISPER_STEP,
                frequencies="fairseq",
            ),
            "decoder": Side(
                domain="text",
                architecture="decoder",
                field=f"decoder_{FIELD}",
                frequencies="fairseq",
                table="embed_positions.weight",
                default=_WHISPER_DECODER,
            ),
        },
        lambda settings, side: "sinpos" if side == "encoder" else _WHISPER_DECODER,
    )
)


# ---- fairseq -----------------------------------------------------------------------------------


def _stock_type(settings: Settings, side: str) -> str:
    if settings.get("no_token_positional_embeddings"):
        return "nopos"
    return "abspos" if settings.get(f"{side}_learned_pos") else "sinpos"


def _fairseq_text(side: str, architecture: str, field: str | None = None) -> Side:
    return Side(
        domain="text",
        architecture=architecture,
        dim=f"{side}_embed_dim",
        field=field,
        start=FIRST_TOKEN,
        frequencies="fairseq",
        table="embed_positions.weight",
        table_first=int(FIRST_TOKEN),
    )


def _fairseq_audio(**settings: Any) -> Side:
    return _encoder("audio", dim="encoder_embed_dim", field=None, **settings)


def _convolutions(settings: Settings) -> float:
    return HOP_SECONDS * 2 ** len(str(settings["conv_kernel_sizes"]).split(","))


_SUBSAMPLE = ("encoder.subsample.",)
_ACOUSTIC = _fairseq_audio(
    start=WINDOW_SECONDS / 2, spacing=lambda settings: HOP_SECONDS * settings["conv_stride"]
)
# The first row whose sides and parts fit a model describes the model.
FAIRSEQ_FAMILIES = (
    Family(
        "ctc_transformer",
        {"encoder": _ACOUSTIC},
        _stock_type,
        _SUBSAMPLE,
    ),
    Family(
        "seq2seq_transformer",
        {
            "encoder": _ACOUSTIC,
            "decoder": _fairseq_text("decoder", "decoder", DECODER_FIELD),
        },
        _stock_type,
        (*_SUBSAMPLE, "encoder.layers."),
    ),
    Family(
        "s2t_transformer",
        {
            "encoder": _fairseq_audio(
                start=FIRST_TOKEN, spacing=_convolutions, unit=_convolutions, frequencies="fairseq"
            ),
            "decoder": _fairseq_text("decoder", "decoder", DECODER_FIELD),
        },
        _stock_type,
        _SUBSAMPLE,
    ),
    Family("transformer", {side: _fairseq_text(side, "seq2seq") for side in SIDES}, _stock_type),
    Family("transformer_lm", {"decoder": _fairseq_text("decoder", "decoder")}, _stock_type),
    Family("transformer_encoder", {"encoder": _fairseq_text("encoder", "encoder")}, _stock_type),
)


def find_fairseq_family(names: Iterable[str]) -> Family | None:
    """The row of a fairseq model, found by the names of the model's parameters; None for models
    with neither encoder nor decoder."""
    names = list(names)

    def has(part: str) -> bool:
        return any(name.startswith(part) for name in names)

    sides = {side for side in SIDES if has(f"{side}.")}
    for family in FAIRSEQ_FAMILIES:
        if sides == family.sides.keys() and all(map(has, family.parts)):
            return family
    return None
