"""Parts that the models of all families share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from cape_plugins import (
    Draw,
    PositionEncoder,
    Positions,
    PositionTable,
    RelativePositions,
    build_position_encoder,
    token_position_at,
    token_positions,
)
from cape_plugins.checkpoints.families import find_family, value_of, width_of
from cape_plugins.mathematics.augmentation import rank_generator
from cape_plugins.mathematics.biases import SHARPNESS, FireBias
from cape_plugins.settings.registry import ENCODINGS, TYPES
from hf_models.processors.limits import follow_in_folder
from hf_models.switching.install import SwitchedModel, install
from hf_models.switching.settings import (
    embeddings_in,
    refuse_in_constructor,
    refuse_misplaced,
    require_own_config,
)

TAG = "cape-plugins"
# names of learned tables and stored sinusoids in stock checkpoints
_TABLES = {r"embed_positions\.weight$", r"embeddings\.(position|time)_embeddings?(\.weight)?$"}
# arguments of from_pretrained that set the place of a checkpoint
_PLACE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class InitializesPositions:
    """Mixin over a PreTrainedModel: initialises parameters of position embeddings."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PositionTable):
            init.normal_(module.weight, std=module.std)
        elif isinstance(module, RelativePositions):
            for table in module.parameters(recurse=False):
                init.uniform_(table, -0.1, 0.1)
        elif isinstance(module, FireBias):  # the linear layers too: see FireBias.bounds
            for parameter, bound in module.bounds():
                init.uniform_(parameter, -bound, bound)
            init.constant_(module.sharpness, SHARPNESS)
            init.ones_(module.threshold)


class PositionModelMixin(InitializesPositions, SwitchedModel):
    """Mixin over a stock model: switches positions at construction, saves and loads the model."""

    # The stock forwards of these families take any keyword but ignore the number of items in a
    # batch; the Trainer would multiply their loss by the number of processes and of accumulation
    # steps. Baselines should be compared through these classes, not through the stock classes.
    accepts_loss_kwargs = False

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Checks the configuration before a stock part is built from it."""
        refuse_in_constructor(cls, embeddings_in(kwargs, None, cls.config_class.position_fields))
        if config is not None:
            require_own_config(config, cls.__name__)
        return super().__new__(cls)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        install(self)
        # do not warn about unused sinusoids or tables in stock checkpoints
        if not self._has_new_table():
            ignored = self._keys_to_ignore_on_load_unexpected
            self._keys_to_ignore_on_load_unexpected = {*(ignored or ()), *_TABLES}

    def _has_new_table(self) -> bool:
        """Whether a new table takes the place of a trained table; transformers reports this."""
        if not any(isinstance(module, PositionTable) for module in self.modules()):
            return False
        stock = map(self.config.stock_type, find_family(self.config.model_type).sides)
        return all(name in TYPES and ENCODINGS[TYPES[name].encoding].counts for name in stock)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Marks the configuration of a copied model, itself a copy, as in use."""
        super().__setstate__(state)
        if hasattr(self.config, "mark_in_use"):  # towers have stock configurations
            self.config.mark_in_use()

    def post_init(self) -> None:
        """See transformers."""
        super().post_init()
        self.finish()

    def finish(self) -> None:
        """Marks a model with switched positions as a model of this package."""
        self.config.mark_in_use()
        self.add_model_tags([TAG])

    @classmethod
    def _complete_config(cls, config: Any, arguments: dict[str, Any]) -> Any:
        """The caller's configuration, or a configuration made from a stock configuration or a dict.
        Takes position embeddings out of the `arguments` of the call, into the configuration."""
        fields = cls.config_class.position_fields
        has_fields = hasattr(config, "position_fields")
        stock_config = config if isinstance(config, PreTrainedConfig) and not has_fields else None
        embeddings = embeddings_in(arguments, stock_config, fields)
        for name in fields:
            arguments.pop(name, None)
        if embeddings and has_fields:
            name = next(iter(embeddings))
            raise ValueError(
                f"config and {name} are both given; give one of them, or set config.{name} before."
            )
        if isinstance(config, Mapping):
            refuse_misplaced(arguments, fields)
            config = cls.config_class.from_dict({**config}, **embeddings)
        elif stock_config is not None:
            refuse_misplaced(arguments, fields)
            config = cls.config_class.of_stock(config, **embeddings) if embeddings else config
        require_own_config(config, cls.__name__)
        return config

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """See transformers; Auto classes build models with this method."""
        return super()._from_config(cls._complete_config(config, kwargs), **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """See transformers. Checkpoints of other kinds of models are refused, even if the caller
        gives a configuration. `config` may be a stock configuration if a position embedding is
        given, and may be a dict, as in Auto classes."""
        if (
            isinstance(config, PreTrainedConfig | Mapping)
            and pretrained_model_name_or_path is not None
        ):
            config = cls._complete_config(config, kwargs)
            location = {name: kwargs[name] for name in _PLACE if name in kwargs}
            try:
                stored, _ = PreTrainedConfig.get_config_dict(
                    pretrained_model_name_or_path, **location
                )
            except OSError:  # an adapter or bare weights
                stored = {}
            config.check_model_type(stored, pretrained_model_name_or_path)
        return super().from_pretrained(
            pretrained_model_name_or_path, *args, config=config, **kwargs
        )

    def save_pretrained(
        self, *args: Any, save_original_format: bool = False, **kwargs: Any
    ) -> None:
        """See transformers. Weights are saved under the names in the model: transformers writes
        older names by default, and resuming with the Trainer would skip such weights. A tokenizer
        in the folder takes the limit of this model."""
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)
        folder = Path(args[0] if args else kwargs["save_directory"])
        if not kwargs.get("is_main_process", True):
            return
        follow_in_folder(folder, self.config)
        if not (card := folder / "README.md").exists():
            card.write_text(
                model_card(type(self).__name__, self.config.position_embedding), encoding="utf-8"
            )


def model_card(name: str, settings: Mapping[str, Any], auto: str | None = None) -> str:
    """A model card that describes the model and shows how to load it.

    Args:
        name: Class of the model.
        settings: Position embedding of the model.
        auto: Auto class that loads the model, if the folder carries the code.
    """
    if auto:
        loading = f"""The folder carries the code of the class:

```python
from transformers import {auto}

model = {auto}.from_pretrained(PATH, trust_remote_code=True)
```
"""
    else:
        loading = f"""The class comes with the package cape-plugins \
(`pip install ".[hf]"` in its repository):

```python
import hf_models

model = hf_models.{name}.from_pretrained(PATH)  # or AutoModel... of transformers
```
"""
    return f"""---
library_name: transformers
tags:
- {TAG}
- {settings["type"]}
---
# {name}

Position embedding: `{json.dumps(settings, sort_keys=True)}`

{loading}"""


def process_generator(device: torch.device) -> torch.Generator | None:
    """A generator that differs between data-parallel ranks; None for the default generator.

    The Trainer and accelerate seed all ranks alike, so all ranks would draw the same positions. A
    number from the common stream and the rank seed the generator. Hosts restore the common stream
    for a resumed training, which therefore draws the same numbers again. Compiled models use the
    default generator, because torch.compile accepts no other: see RankSeedCallback.
    """
    if (
        torch.compiler.is_compiling()
        or not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_world_size() == 1
    ):
        return None
    return rank_generator(device, distributed.get_rank())


def content_of_call(ids: Tensor | None, embeds: Tensor | None, side: str = "") -> Tensor:
    """The ids or embeddings in a call of a model.

    Args:
        ids: ``[B, T]``.
        embeds: ``[B, T, C]``.
        side: Beginning of the names of the arguments.

    Raises:
        ValueError: if both or neither are given, or if there is no token.
    """
    if (ids is None) == (embeds is None):
        raise ValueError(
            f"{side}input_ids and {side}inputs_embeds are {'both' if ids is not None else 'not'} "
            "given; allowed: exactly one of them. Give the ids of the tokens, or their embeddings "
            "in the place of the ids."
        )
    name, content = ("input_ids", ids) if embeds is None else ("inputs_embeds", embeds)
    if 0 in content.shape[:2]:
        raise ValueError(
            f"{side}{name} has shape {tuple(content.shape)}; allowed: at least one text of at "
            "least one token. Leave out empty texts and batches."
        )
    return content


def draw_positions(
    encoder: PositionEncoder, content: Tensor, partner: Draw | None = None
) -> Draw | None:
    """One draw for a batch ``[B, ...]``; `partner` is the draw of the other side, if there is one.
    None in evaluation, and if nothing is random."""
    return encoder.draw(content.shape[0], content.device, process_generator, partner)


def build_positions(
    config: Any, side: str, table_size: int | tuple[int, ...] = 1, std: float = 1.0
) -> PositionEncoder:
    """Builds the position encoder of one side of a model from the row of the model's family.

    Args:
        config: Configuration of the model.
        side: "encoder" or "decoder".
        table_size: Rows of a learned table; for images the size in patches.
        std: Standard deviation of the initial values of a learned table.

    Raises:
        ValueError: if the row has no such side, or ``dim`` in the row names no field of `config`.
    """
    stored = vars(config)
    sides = find_family(config.model_type, stored).sides
    if side not in sides:
        raise ValueError(
            f"side={side!r} is no side of the family {config.model_type!r}; allowed: "
            f"{', '.join(sides)}. Name one of these, or add the side to Family(sides=...)."
        )
    row = sides[side]
    try:
        dim = width_of(row, config)
    except (AttributeError, KeyError):
        numbers = (name for name, value in stored.items() if type(value) is int)
        raise ValueError(
            f"dim={row.dim!r} of the {side} of the family {config.model_type!r} names no field of "
            f"{type(config).__name__}; allowed: the field with the width of the model, one of "
            f"{', '.join(sorted(numbers))}, or PART.FIELD. Correct Side(dim=...)."
        ) from None
    return build_position_encoder(
        config.position_settings(row.field),
        dim,
        side="target" if side == "decoder" else "source",
        start=value_of(row.start, stored),
        unit=value_of(row.unit, stored),
        frequencies=row.frequencies,
        layout=row.layout,
        table_size=table_size,
        table_std=std,
    )


def embed_positions(
    encoder: PositionEncoder, positions: Positions, draw: Draw | None, content: Tensor
) -> Tensor | None:
    """``[B or 1, T, C]`` in the precision of `content`; None if nothing is added.

    Augmented if there is a draw. A model in training mode that generates text has no draw, because
    each step must see the same positions as earlier steps.
    """
    if encoder.config.encoding.counts and positions.in_steps and positions.first is None:
        positions = _rows_of_table(positions, encoder.encoding.weight.shape[0])
    return encoder(
        positions,
        draw,
        dtype=content.dtype,
        random=encoder.draws and draw is not None,
        generator=process_generator,
    )


def _rows_of_table(positions: Positions, size: int) -> Positions:
    """The caller's positions as rows of a learned table, which begins anew after the last row."""
    number = torch.arange(size, dtype=torch.float32, device=positions.rows.device)
    row_of = positions.rows[..., 0].long() % size
    return Positions(number.view(1, -1, 1), in_steps=True, row_of=row_of, first=0)


def text_span(mask: Tensor) -> Tensor:
    """``[B, T]`` bool, False on the padding before and behind each text of a mask ``[B, T]``.
    Hidden tokens inside a text keep their places, because stock models count them."""
    visible = mask.bool()
    count = visible.cumsum(1)
    return visible | (count > 0) & (count < count[:, -1:])


def decoder_positions(
    length: int,
    past: int | Tensor,
    mask: Tensor | None,
    device: torch.device,
    position_ids: Tensor | None = None,
) -> Positions:
    """Positions of the tokens that a decoder is given, counted from the beginning of the text.

    Args:
        length: T, tokens given now.
        past: Number of tokens in the cache; a tensor if the cache has a fixed size.
        mask: ``[B, past + T]``, 0 on padding; None if nothing is padded. Text is counted from its
            first token, also in batches padded on the left. For caches of a fixed size transformers
            makes a mask ``[B, 1, T, S]``, bool or added to scores: positions count from the first
            key that a query sees.
        device: Device of the tokens.
        position_ids: ``[T]`` or ``[B or 1, T]``, the caller's positions, used instead of the mask.

    Returns:
        Positions, of which the last T belong to the tokens given now.
    """
    if position_ids is None and mask is not None and mask.dim() == 4:
        visible = mask[:, 0]
        if visible.is_floating_point():  # hidden: the least number of a precision, or -inf
            visible = visible > torch.finfo(visible.dtype).min / 2
        first = (visible > 0).int().argmax(-1)
        position_ids = torch.arange(length, device=device) + past - first
    if position_ids is not None:
        number = position_ids.view(-1, length, 1)
        return Positions(number.float(), in_steps=True)
    if mask is not None and mask.dim() == 2:
        return token_positions(text_span(mask))
    return token_position_at(past, device, length)
