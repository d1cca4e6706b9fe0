"""The core in a plain torch loop, as in the README: nn.Transformer learns to copy, its training
random and its evaluation deterministic, whatever the registry offers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cape_plugins import TYPES, PositionConfig, build_position_encoder, token_positions
from cape_plugins.mathematics.encoder import SIDES

DIM, WORDS, PAD, BOS = 32, 12, 0, 1
STEPS = 60

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Copier(nn.Module):
    """An encoder-decoder with a position encoder for each side and one draw for a pair."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.transformer = nn.Transformer(DIM, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.project = nn.Linear(DIM, WORDS)
        self.positions, self.target_positions = (
            build_position_encoder(config, DIM, side=side, table_size=16) for side in SIDES
        )

    def forward(self, source, target):
        draw = self.positions.draw(len(source), source.device)
        if draw is not None:  # drawn positions have one count on both sides
            spans = (
                self.positions.num_positions(source.ne(PAD)),
                self.target_positions.num_positions(target.ne(PAD)),
            )
            draw = draw.covering(*spans)
        sides = []
        for tokens, positions in ((source, self.positions), (target, self.target_positions)):
            content = self.embed(tokens) * DIM**0.5
            embedding = positions(token_positions(tokens.ne(PAD)), draw)
            sides.append(content if embedding is None else content + embedding)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        padding = source.eq(PAD)
        return self.project(
            self.transformer(
                *sides,
                tgt_mask=mask,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
        )


def batch_of_pairs(size=32):
    """Random words with padding, to be copied."""
    words = torch.randint(2, WORDS, (size, 6))
    lengths = torch.randint(3, 7, (size, 1))
    words = words.masked_fill(torch.arange(6)[None] >= lengths, PAD)
    start = torch.full((size, 1), BOS)
    return words, torch.cat((start, words[:, :-1]), dim=1), words


def loss_of(model, batch):
    source, shifted, expected = batch
    scores = model(source, shifted)
    return F.cross_entropy(scores.flatten(0, 1), expected.flatten(), ignore_index=PAD)


def make_model(name):
    scale = {"source_scale": "1"} if "source_scale" in TYPES[name].options else {}
    if TYPES[name].sampling:
        scale["max_position"] = 32  # within so few updates, not positions of all lengths
    return Copier(PositionConfig(name, architecture="seq2seq", **scale))


@pytest.mark.parametrize("name", TYPES)
def test_training_reduces_the_loss(name):
    model, held_out = make_model(name), batch_of_pairs(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def evaluate():
        model.eval()
        with torch.no_grad():
            result = loss_of(model, held_out).item()
        model.train()
        return result

    untrained = evaluate()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of_pairs()).backward()
        optimizer.step()
    assert evaluate() < 0.85 * untrained
    assert evaluate() == evaluate()
    model.train()
    random = loss_of(model, held_out) != loss_of(model, held_out)
    assert random == model.positions.config.random
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_left_padding_gives_the_same_predictions():
    model = make_model("cape").eval()
    source, shifted, _ = batch_of_pairs(8)
    rolled = torch.stack([row.roll(int(row.eq(PAD).sum())) for row in source])
    assert not torch.equal(rolled, source)
    assert rolled[:, -1].ne(PAD).all()
    torch.testing.assert_close(model(rolled, shifted), model(source, shifted))


def test_checkpoints_hold_no_positions_and_move_between_types():
    state = make_model("cape").state_dict()
    assert not [key for key in state if key.startswith("positions")]
    for name in ("sinpos", "shape", "nopos"):
        make_model(name).load_state_dict(state)
    learned = make_model("abspos").state_dict()
    assert set(learned) - set(state) == {
        "positions.encoding.weight",
        "target_positions.encoding.weight",
    }
