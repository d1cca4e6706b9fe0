"""Encoder and decoder stacks of fairseq with cape positions: overrides that pass the draw of the
source side on to the target side, and put a BOS token before the source.

The mixins are put over the class of a built stack, because some models ignore the methods that
build a stack (transformer_align) and others have no such methods (language models).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import Draw, PositionConfig
from cape_plugins.mathematics.binding import Bound
from fairseq_user_dir.attention import StackAttention
from fairseq_user_dir.embedding import MAX_POSITIONS, TokenPositionEmbedding


class _PositionStack:
    """Code that both stacks share.

    Attributes:
        position_config: Settings of the model.
        position_module: The module that computes positions, with or without random numbers; None if
            positions are rows of a learned table or relative keys, or there are no positions.
    """

    position_config: PositionConfig
    embed_positions: nn.Module | None
    stack_attention: StackAttention | None

    @property
    def position_module(self) -> TokenPositionEmbedding | StackAttention | None:
        if self.stack_attention is not None:
            return self.stack_attention
        module = self.embed_positions
        return module if isinstance(module, TokenPositionEmbedding) else None

    def max_positions(self) -> int:
        """No limit: positions are computed, or begin again at the first row of the table. The
        *task* filters the data, at 1024 tokens unless ``--max-source-positions`` and
        ``--max-target-positions`` set other limits."""
        return MAX_POSITIONS


class EncoderPositions(Bound, _PositionStack):
    """Mixin over a TransformerEncoder: draws in training and inserts the BOS hint. Holds the number
    of target tokens ``[B]``, if the model knows this number."""

    padding_idx: int
    embed_tokens: nn.Module
    dictionary: Any

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Any]]:
        """fairseq's encoder output with two more entries:

        - **position_draw**: ``[Draw]`` of this forward, in training, for the decoder;
        - **src_tokens**: ``[B x S]``, the caller's tokens, if a BOS token was put before them.
        """
        caller_tokens = src_tokens
        if self.position_config.source_bos:
            bos = self.dictionary.bos()
            src_tokens, column = prepend_bos(src_tokens, self.padding_idx, bos)
            if token_embeddings is not None:
                token_embeddings = self._prepend_embedding(token_embeddings, column, bos)
        module = self.position_module
        draw = None if module is None else module.draw(src_tokens.shape[0], src_tokens.device)
        if draw is not None and draw.order is not None and self.position_config.synchronize:
            # both sides share one drawn function, with an entry for each index of the longer side
            target = () if self.bound is None else (self.bound,)
            lengths = module.encoder.num_positions(src_tokens.ne(self.padding_idx))
            draw = draw.covering(lengths, *target)
        with _using(module, draw, src_tokens):
            out = super().forward_scriptable(
                src_tokens, src_lengths, return_all_hiddens, token_embeddings
            )
        if draw is not None:
            out["position_draw"] = [draw]  # a list, as all values of fairseq's encoder output
        if self.position_config.source_bos:
            # under this stock name, so that the stock reorder_encoder_out reorders the tokens with
            # the beams
            out["src_tokens"] = [caller_tokens]
        return out

    def _reorder_encoder_out(self, encoder_out: dict[str, Any], new_order: Tensor) -> Any:
        """Reorders the output. The beams of BART share the encoder states of their source; the
        caller's tokens, like attention, have one row for each beam."""
        encoder_out = super()._reorder_encoder_out(encoder_out, new_order)
        tokens = [tokens.index_select(0, new_order) for tokens in encoder_out["src_tokens"]]
        return {**encoder_out, "src_tokens": tokens}

    def _prepend_embedding(self, embeddings: Tensor, column: Tensor, bos: int) -> Tensor:
        """``[B, S, C]`` to ``[B, S + 1, C]`` with the embedding of BOS at `column` ``[B, 1]``."""
        embeddings = F.pad(embeddings, (0, 0, 1, 0))
        vector = self.embed_tokens(column.new_full(column.shape, bos))
        return embeddings.scatter(1, column[..., None].expand_as(vector), vector)


class DecoderPositions(_PositionStack):
    """Mixin over a TransformerDecoder: uses the draw of the encoder, or draws itself if the sides
    are independent and in language models. Returns attention over the caller's source tokens."""

    padding_idx: int

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Any | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """See fairseq. Every decoder calls this method first, also a non-autoregressive decoder."""
        draw = self._draw(prev_output_tokens, encoder_out)
        state = kwargs.get("incremental_state", args[0] if args else None)
        with _using(self.position_module, draw, prev_output_tokens, state):
            features, extra = super().extract_features(
                prev_output_tokens, encoder_out, *args, **kwargs
            )
        return features, self._align_attention(extra, encoder_out)

    def _draw(self, tokens: Tensor, encoder_out: Any | None) -> Draw | None:
        module = self.position_module
        if module is None or not module.encoder.draws:
            return None
        draws = (encoder_out or {}).get("position_draw")
        if not self.position_config.synchronize:
            # with the draw of the encoder, so that both sides leave the same samples unaugmented
            return module.draw(tokens.shape[0], tokens.device, *(draws or ()))
        if not draws:
            raise ValueError(
                "this decoder is in training and shares the position draw of its encoder "
                "(--position-synchronize true), but encoder_out holds no 'position_draw': run "
                "the encoder in training mode too and pass its whole output on, call .eval(), or "
                "train with --position-synchronize false."
            )
        return draws[0]

    def _align_attention(self, extra: dict[str, Any], encoder_out: Any | None) -> dict[str, Any]:
        """Attention without the column of the BOS hint: ``[B, T, S]`` for the caller's S tokens."""
        attention = extra.get("attn") if extra else None
        caller_tokens = (encoder_out or {}).get("src_tokens")
        if (
            self.position_config.source_bos
            and caller_tokens
            and isinstance(attention, list)
            and isinstance(attention[0], Tensor)
        ):
            # In a shorter, left-padded sentence the column of BOS is not the first: it is the
            # column of the last padding token of the caller.
            pads = caller_tokens[0].eq(self.padding_idx)[:, None]
            extra["attn"] = [attention[0][..., 1:].masked_fill(pads, 0.0), *attention[1:]]
        return extra


def prepend_bos(tokens: Tensor, padding_idx: int, bos: int) -> tuple[Tensor, Tensor]:
    """Puts BOS directly before the first real token, for left and right padding alike.

    Args:
        tokens: ``[B, S]``.
        padding_idx: Index of padding.
        bos: Index of BOS.

    Returns:
        ``[B, S + 1]``, the tokens, and ``[B, 1]``, the column of BOS.
    """
    column = tokens.ne(padding_idx).int().argmax(dim=1, keepdim=True)
    return F.pad(tokens, (1, 0), value=padding_idx).scatter(1, column, bos), column


@contextmanager
def _using(
    module: TokenPositionEmbedding | StackAttention | None,
    draw: Draw | None,
    tokens: Tensor,
    incremental_state: Any | None = None,
) -> Iterator[None]:
    """Attaches the draw, or the positions of the layers, to the module during a stock call, which
    has no argument for either. Overriding fairseq's forwards instead would copy 90 lines."""
    if module is None:
        yield
    elif isinstance(module, StackAttention):
        with module.using(module.of_tokens(tokens, draw, incremental_state)):
            yield
    else:
        with module.using(draw):
            yield
