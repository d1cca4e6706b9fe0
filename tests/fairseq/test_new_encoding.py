"""An encoding that this package has never seen works in fairseq: a model with it is trained,
decodes as it was taught, and its checkpoint settings are read."""

import torch

from fairseq_user_dir.embedding import TokenPositionEmbedding
from tests.support.fairseq_models import batch, build, configure, decoder_input, loss_of, train
from tests.support.triangle import Triangle, add_triangle


def test_a_model_takes_a_new_encoding(monkeypatch):
    add_triangle(monkeypatch)
    cfg = configure("--position-embedding", "triangle", "--position-max-offset", 5)
    assert cfg.model.position_embedding == "triangle"
    model = build(position_embedding="triangle", position_max_offset=5)
    seam = model.encoder.embed_positions
    assert isinstance(seam, TokenPositionEmbedding)
    assert isinstance(seam.encoder.encoding, Triangle)
    before = loss_of(model.eval(), 0).item()
    assert loss_of(train(model), 0) != loss_of(model, 0)  # random in training
    assert loss_of(model.eval(), 0).item() < before
    (tokens, lengths), words = batch(), decoder_input(lengths=(6, 6, 6, 6))
    encoder_out = model.encoder(tokens, lengths)
    whole, _ = model.decoder(words, encoder_out)
    state = {}
    for length in range(1, words.shape[1] + 1):
        step, _ = model.decoder(words[:, :length], encoder_out, incremental_state=state)
        torch.testing.assert_close(step[:, 0], whole[:, length - 1], atol=1e-5, rtol=1e-4)
