"""Tables with a row for each position, as in BERT, RoBERTa, GPT-2, OPT and CLIP's text model, for
all such families.

The stock model decides which row each token has. Stock models count from 0 or from behind the
padding token, over all tokens or over a mask. The table of this package is asked for these rows and
finds the positions in them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from cape_plugins import PositionConfig, Positions, build_position_encoder, token_positions
from hf_models.seams.base import Seam
from hf_models.seams.scope import Scope
from hf_models.seams.stack_attention import leave_for_layers
from hf_models.switching.modeling import embed_positions, text_span

_TABLE = re.compile(
    r"(^|_)(wpe|pos|positions?|pos_emb\w*|position_embeddings?|embed_positions?|positions_embed|"
    r"positional_embeddings?)$"
)
# tables of distances, of coordinates on a page, of time steps, of objects
_OTHER_TABLE = re.compile(r"rel|bias|query|^[hwxy]_|time|token_type|segment|2d|char|row_|col_")
_BUFFERS = ("position_ids", "token_type_ids")  # stock buffers that end with the table
_STOCK_SIZES = "stock_sizes_of_buffers"  # attribute of a module whose buffers have grown
_DECODER = re.compile(r"(^|\.|_)decoder\.")  # in the path of a module
_DECODER_MASK = "decoder_attention_mask"
_CAUSAL_MASK = "bias"  # stock buffer [1, 1, N, N] of attention modules, which ends with the table
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
_PACKED = ("pixel_values", "spatial_shapes")  # arguments of modules that embed packed patches
_NO_END = 1 << 30  # rows of a table without end
_ROOM = 8192  # tokens for which an exported graph has room
_STD = 0.02  # of new tables, if the configuration says nothing
_CONTENT = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


class CountedRows(Seam):
    """Base of the mixins over stock modules that look up a row for each token: finds the positions
    in the numbers of the rows.

    Attributes:
        first_row: Row of the first position.
        in_decoder: Whether the module is in the decoder of a model of two stacks.
        like: ``[1]``, has the device and the precision of the dropped stock table.
    """

    adds = True
    in_decoder = False
    first_row: int
    like: Tensor

    def build(self, config: Any, table: Tensor, trained_rows: int, **layout: Any) -> PositionConfig:
        """Builds the position encoder, and returns its settings.

        Args:
            config: Configuration of the model.
            table: ``[N, C]``, the stock table.
            trained_rows: Positions that the stock table has.
            **layout: Frequencies, layout and first coordinate of sinusoids.
        """
        settings = self.settings_in(config)
        self.positions = build_position_encoder(
            settings,
            table.shape[1],
            side="target" if self.side == "decoder" else "source",
            table_size=trained_rows,
            table_std=getattr(config, "initializer_range", _STD),
            **layout,
        )
        return settings

    def remember(self, table: Tensor) -> None:
        """Keeps an element for the device and the precision of a stock table that goes."""
        self.register_buffer("like", table.detach().new_zeros(1), persistent=False)

    def embed(self, rows: Tensor) -> Tensor:
        """Embeddings to add, ``[B or 1, T, C]``, or ``[T, C]`` for rows of no batch.

        Args:
            rows: ``[B or 1, T]`` or ``[T]``, the row of each token, from `first_row` on; rows
                before it are padding.
        """
        numbers = rows[None] if rows.dim() == 1 else rows
        scope, like = self.bound, self.like
        positions, batch_size = self._positions(scope, numbers)
        draw = None if scope is None else scope.draw(self.positions, batch_size, rows.device)
        leave_for_layers(self, scope, positions, draw, numbers.shape[1])
        embedding = embed_positions(self.positions, positions, draw, like)
        if embedding is None:  # always a tensor, which some stock forwards need
            return like.new_zeros(*rows.shape, self.embedding_dim)
        embedding = embedding[:, -numbers.shape[1] :]
        return embedding[0] if rows.dim() == 1 and len(embedding) == 1 else embedding

    def _positions(self, scope: Scope | None, rows: Tensor) -> tuple[Positions, int]:
        """Positions of the tokens, or of all tokens of the text so far, and the size of the batch.
        Tokens are counted from the first one that is no padding, unless the caller gives
        positions, which may begin at 0 or at the first row."""
        batch_size, length = rows.shape
        number = rows - self.first_row
        if scope is not None:
            content = scope.size(*_CONTENT)
            batch_size = batch_size if content is None else content[0]
            # a stock decoder opens no scope: its mask is among the arguments of the whole model
            is_whole = _DECODER_MASK in scope.names and self.in_decoder
            mask = scope.argument(_DECODER_MASK if is_whole else "attention_mask")
            is_counted = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length
            if is_counted and scope.argument("position_ids") is None:
                # generation of transformers leaves hidden tokens out when it counts
                span = mask.bool() if self.side == "decoder" else text_span(mask)
                return token_positions(span), batch_size
            if scope.argument("position_ids") is not None:
                number = _from_first_row(number, mask[:, -length:] if is_counted else None)
        return Positions(number.clamp(min=0)[..., None].float(), in_steps=True), batch_size


class RowTable(CountedRows, nn.Embedding):
    """Takes the place of a stock table. Stock classes that choose the rows themselves, such as
    OPT's, stay in front of this class, so whatever rows they choose arrive in :meth:`forward`.

    Attributes:
        keeps_table: Whether the stock table stays. Longer texts then begin the table anew behind
            its last row, like all learned tables in this package (CAPE 5.2).
    """

    keeps_table: bool

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: tables with the name of positions, except
        tables of image patches, whose owner has a convolution or takes packed patches."""
        for path, module in model.named_modules():
            owner_path, _, name = path.rpartition(".")
            if not isinstance(module, nn.Embedding) or isinstance(module, cls):
                continue
            if not is_position_table(name):
                continue
            owner = model.get_submodule(owner_path)
            is_grid = any(isinstance(part, _CONVOLUTIONS) for part in owner.modules())
            if not (is_grid or takes_packed_patches(owner)):
                yield path, module, {}

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`."""
        return (cls,) if stock is nn.Embedding else (stock, cls), keywords

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.in_decoder = bool(_DECODER.search(path))
        offset = getattr(self, "offset", None)
        after_padding = 0 if self.padding_idx is None else self.padding_idx + 1
        self.first_row = offset if isinstance(offset, int) else after_padding
        table = self._parameters["weight"]
        settings = self.build(config, table, self.num_embeddings - self.first_row)
        self.keeps_table = settings.encoding.counts
        if self.keeps_table:
            self.positions.encoding = None  # the stock table has the rows
        else:
            self.remember(self._parameters.pop("weight"))
            if not isinstance(owner, PreTrainedModel):  # which initialises its buffers itself
                # an exported graph keeps the size that buffers have; checkpoints may hold others
                in_no_checkpoint = owner._non_persistent_buffers_set
                _grow_buffers(owner, self.num_embeddings + 1, _ROOM, in_no_checkpoint)

    def stock_table(self, path: str) -> str:
        """See :class:`~hf_models.seams.base.Seam`."""
        return f"{path}.weight"

    @property
    def positions_of_table(self) -> int:
        """Positions for which the stock table has rows."""
        return self.num_embeddings - self.first_row

    @property
    def weight(self) -> Tensor:
        """Returns the stock table, or zeros of the same shape, which take no memory, if the table
        was dropped. Stock code reads the width, device and precision of the table, and compares the
        length of a text with the number of rows. During a forward, zeros without end replace a
        table that was dropped or is shorter than the text."""
        table = self._parameters.get("weight")
        if table is not None and (self.bound is None or self._fits(self.bound)):
            return table
        like = self.like if table is None else table.new_zeros(1)
        rows = self.num_embeddings if self.bound is None else _NO_END
        endless = like.expand(rows, self.embedding_dim)
        if not torch.compiler.is_compiling():
            endless._is_hf_initialized = True  # transformers leaves such tensors alone
        return endless

    def _fits(self, scope: Scope) -> bool:
        """Whether the table has a row for each token of the texts of this forward."""
        sizes = [size for name in _CONTENT if (size := scope.size(name)) is not None]
        longest = max((size[1] for size in sizes if len(size) > 1), default=0)
        return longest <= self.positions_of_table

    def adapt_call(self, model: nn.Module, call: dict[str, Any]) -> None:
        """See :class:`~hf_models.seams.base.Seam`. Stock buffers that end with the table grow
        with the text; compiled models see few sizes."""
        sizes = [call[name].shape for name in _CONTENT if isinstance(call.get(name), Tensor)]
        mask = call.get("attention_mask")  # with a cache also over earlier tokens
        sizes += [mask.shape] if isinstance(mask, Tensor) and mask.dim() == 2 else []
        length = max([0, *(size[1] for size in sizes if len(size) > 1)]) + self.first_row
        if length <= self.num_embeddings:
            return
        new_size = 1 << (length - 1).bit_length()
        paths = (path for path in model.seam_paths if model.get_submodule(path) is self)
        owner = model.get_submodule(next(paths).rpartition(".")[0])
        _grow_buffers(owner, length, new_size)
        for module in model.modules():
            buffer = module._buffers.get(_CAUSAL_MASK)
            if buffer is not None and buffer.dim() == 4 and buffer.shape[-1] < length:
                module._buffers[_CAUSAL_MASK] = _causal_mask(buffer, new_size)

    def forward(self, rows: Tensor) -> Tensor:
        """See :meth:`CountedRows.embed`."""
        if self.keeps_table:
            return F.embedding(
                self._begun_anew(rows),
                self._parameters["weight"],
                self.padding_idx,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.sparse,
            )
        return self.embed(rows)

    def _begun_anew(self, rows: Tensor) -> Tensor:
        size = self.positions_of_table
        beyond = self.first_row + (rows - self.first_row) % size
        # rows before the first position belong to padding, and the remainder would move them
        return torch.where(rows < self.num_embeddings, rows, beyond)


def _from_first_row(number: Tensor, mask: Tensor | None) -> Tensor:
    """The caller's positions ``[B, T]``, moved to begin at 0 in texts that begin before the first
    row: the caller counts from 0, not from the row behind padding.

    Args:
        number: Numbers of the rows, counted from the first row; padding has -1.
        mask: ``[B, T]``, 0 on padding; None if unknown, and -1 is taken for padding then.
    """
    hidden = number == -1 if mask is None else ~mask.bool()
    before = torch.where(hidden, 0, number).amin(-1, keepdim=True).clamp(max=0)
    return number - before


def is_position_table(name: str) -> bool:
    """Whether an attribute of a stock module is called like a table of positions."""
    return bool(_TABLE.search(name)) and not _OTHER_TABLE.search(name)


def takes_packed_patches(module: nn.Module) -> bool:
    """Whether a stock module is given patches of images, and the sizes of the images, alone."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == _PACKED


def _grow_buffers(
    owner: nn.Module, length: int, new_size: int, names: Collection[str] = _BUFFERS
) -> None:
    """Gives the numbers of positions and the types of tokens `new_size` elements, if there are
    fewer than `length`. Checkpoints keep the stock size.

    Args:
        owner: The module with the table.
        length: Elements that are needed.
        new_size: Elements to make.
        names: Buffers that may grow.
    """
    for name in (name for name in _BUFFERS if name in names):
        buffer = owner._buffers.get(name)
        if buffer is not None and buffer.shape[-1] < length:
            if name not in owner._non_persistent_buffers_set:
                _remember_stock_size(owner, name, buffer.shape[-1])
            numbers = torch.arange(new_size, device=buffer.device, dtype=buffer.dtype)
            numbers = numbers.expand(*buffer.shape[:-1], -1)
            is_count = name == "position_ids"
            owner._buffers[name] = numbers if is_count else torch.zeros_like(numbers)


def _remember_stock_size(owner: nn.Module, name: str, size: int) -> None:
    if not hasattr(owner, _STOCK_SIZES):
        setattr(owner, _STOCK_SIZES, {})
        owner.register_state_dict_post_hook(_save_stock_sizes)
    getattr(owner, _STOCK_SIZES).setdefault(name, size)


def _save_stock_sizes(
    owner: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any
) -> None:
    """Cuts buffers that have grown to their stock size, in the weights to be saved."""
    for name, size in getattr(owner, _STOCK_SIZES, {}).items():
        if (buffer := state.get(prefix + name)) is not None:
            state[prefix + name] = buffer[..., :size].contiguous()


def _causal_mask(mask: Tensor, size: int) -> Tensor:
    """The causal mask ``[1, 1, N, N]`` of an attention module with `size` instead of N positions.
    The last query of a local layer sees fewer than N keys."""
    window, old_size = mask[0, 0, -1].sum(), mask.shape[-1]
    distance = torch.arange(size, device=mask.device)
    distance = distance[:, None] - distance
    is_near = (distance < window) | (window == old_size)
    return ((distance >= 0) & is_near).to(mask.dtype)[None, None]
