"""ADMIN: formula, profiling, and the ways in which fairseq runs a layer."""

import argparse
import copy
import math
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import nn
from torch.nn import functional as F

from fairseq_user_dir.admin import (
    AdminProfile,
    ProfilingBatch,
    attach_admin,
    profile_admin,
    profiling_batch,
)

REPO = Path(__file__).resolve().parents[2]
VOCABULARY = 40  # with the four special symbols


def make_dictionary():
    dictionary = Dictionary()
    for index in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


class Task:
    """What a transformer asks of its task."""

    def __init__(self):
        self.source_dictionary = self.target_dictionary = make_dictionary()


def build(arch="transformer_tiny", seed=1, **options):
    """A stock model; encoder and decoder options as in its arguments."""
    args = argparse.Namespace(
        encoder_embed_dim=16, encoder_ffn_embed_dim=24, max_source_positions=64,
        max_target_positions=64, tokens_per_sample=64, arch=arch, **options,
    )  # fmt: skip
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, Task())


def batch(rows=6, source=9, target=7, seed=5):
    """Left-padded source, and decoder input; every row shorter than the one before."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, VOCABULARY, (rows, source), generator=generator)
    prev = torch.randint(4, VOCABULARY, (rows, target), generator=generator)
    src[:, -1] = prev[:, 0] = 2
    for row in range(rows):
        src[row, : row // 2] = 1
        prev[row, target - row // 2 :] = 1
    return ProfilingBatch(src, prev)


def run(model, data):
    src, prev = data
    return model(src, src.ne(1).sum(1), prev)[0]


def loss_of(model, data):
    return F.cross_entropy(run(model, data).transpose(1, 2), data.prev_output_tokens)


def omegas(model):
    return {name: p for name, p in model.named_parameters() if ".admin." in name}


def scatter_omegas(model, seed=9):
    """Omegas with a value of its own in every channel, so that a mix-up of two shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for omega in omegas(model).values():
            omega.copy_(0.5 + torch.rand(omega.shape, generator=generator))


def attached(seed=1, **options):
    model = build(seed=seed, **options)
    attach_admin(model)
    scatter_omegas(model)
    return model


# ---------------------------------------------------------------------------------------- formula


def test_layers_compute_the_formula_of_the_paper():
    model = attached().eval()
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[1]
    x, memory = torch.randn(5, 3, 16), torch.randn(4, 3, 16)

    def attend(attention, query, keys):
        return attention(query, keys, keys)[0]

    def feed_forward(layer, x):
        return layer.fc2(torch.relu(layer.fc1(x)))

    w = encoder.admin.omega
    h = encoder.self_attn_layer_norm(attend(encoder.self_attn, x, x) + w[0] * x)
    expected = encoder.final_layer_norm(feed_forward(encoder, h) + w[1] * h)
    torch.testing.assert_close(encoder(x, None), expected)
    swapped = encoder.final_layer_norm(feed_forward(encoder, h) + w[0] * h)
    assert not torch.allclose(expected, swapped, atol=1e-3)  # the comparison can fail

    w = decoder.admin.omega
    h = decoder.self_attn_layer_norm(attend(decoder.self_attn, x, x) + w[0] * x)
    h = decoder.encoder_attn_layer_norm(attend(decoder.encoder_attn, h, memory) + w[1] * h)
    expected = decoder.final_layer_norm(feed_forward(decoder, h) + w[2] * h)
    torch.testing.assert_close(decoder(x, memory)[0], expected)


def test_unprofiled_omegas_change_nothing():
    stock, model = build().eval(), build().eval()
    attach_admin(model)
    torch.testing.assert_close(run(model, batch()), run(stock, batch()), atol=1e-6, rtol=1e-6)
    scatter_omegas(model)
    assert not torch.allclose(run(model, batch()), run(stock, batch()), atol=1e-3)


def test_omegas_are_named_trainable_parameters():
    model = build()
    attach_admin(model)
    names = [f"encoder.layers.{i}.admin.omega.{j}" for i in range(2) for j in range(2)]
    names += [f"decoder.layers.{i}.admin.omega.{j}" for i in range(2) for j in range(3)]
    assert list(omegas(model)) == names
    assert set(names) <= set(model.state_dict())
    loss_of(model, batch()).backward()
    for omega in omegas(model).values():
        assert omega.shape == (16,)
        assert omega.grad.abs().sum() > 0


def test_incremental_decoding_equals_full_decoding():
    model = attached().eval()
    src, prev = batch()
    prev = prev[:2]  # rows without padding
    encoder_out = model.encoder(src[:2], src[:2].ne(1).sum(1))
    full = model.decoder(prev, encoder_out=encoder_out)[0]
    state = {}
    for step in range(prev.shape[1]):
        now = model.decoder(prev[:, : step + 1], encoder_out=encoder_out, incremental_state=state)
        torch.testing.assert_close(now[0][:, 0], full[:, step], atol=1e-5, rtol=1e-5)


def test_without_cross_attention_there_are_two_sublayers():
    model = build(no_cross_attention=True)
    attach_admin(model)
    assert len(model.decoder.layers[0].admin.omega) == 2
    profile = profile_admin(model, *batch(), seed=3)
    assert len(profile.decoder) == 4
    assert model.decoder.layers[0].admin.omega[1].mean().item() == pytest.approx(profile.decoder[1])


# -------------------------------------------------------------------------------------- profiling


def recurrence_by_hand(model, data, seed):
    """Constants that follow from what flows through a profiled model, seen from outside.

    Residuals are layer inputs and layer-norm outputs, branches are what leaves the dropout module.
    Returns a list [(constant the sub-layer should have, its omega)] per stack.
    """
    found = []
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            seen = {"residual": [], "branch": []}
            norms = [layer.self_attn_layer_norm, getattr(layer, "encoder_attn_layer_norm", None)]
            hooks = [
                layer.register_forward_pre_hook(
                    lambda _, args, seen=seen: seen["residual"].append(args[0])
                ),
                layer.dropout_module.register_forward_hook(
                    lambda _, args, out, seen=seen: seen["branch"].append(out)
                ),
            ]
            hooks += [
                norm.register_forward_hook(
                    lambda _, args, out, seen=seen: seen["residual"].append(out)
                )
                for norm in norms
                if norm is not None
            ]
            found.append((stack, layer, seen, hooks))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with torch.no_grad():
        run(model.train(), data)
    torch.set_rng_state(state)

    results = []
    for stack in (model.encoder, model.decoder):
        s, pairs = 1.0, []
        for owner, layer, seen, hooks in found:
            for hook in hooks:
                hook.remove()
            if owner is not stack:
                continue
            assert len(seen["branch"]) == len(seen["residual"]) == len(layer.admin.omega)
            for r, f, omega in zip(
                seen["residual"], seen["branch"], layer.admin.omega, strict=True
            ):
                pairs.append((s, omega))
                f, r = f.numpy().astype("float64"), r.numpy().astype("float64")
                s = math.sqrt(((s * r) ** 2).mean() - (s * r).mean() ** 2 + f.var())
        results.append(pairs)
    return results


def check_recurrence(model, profile, seed):
    results = recurrence_by_hand(model, batch(), seed)
    for constants, pairs in zip(profile, results, strict=True):
        assert constants[0] == 1.0
        assert constants == pytest.approx([s for s, _ in pairs], rel=1e-5)
        for s, omega in pairs:
            torch.testing.assert_close(omega.detach(), torch.full((16,), s), atol=0, rtol=1e-5)


def test_profile_follows_the_recurrence():
    model = build(dropout=0.2)
    attach_admin(model)
    profile = profile_admin(model, *batch(), seed=3)
    assert [len(constants) for constants in profile] == [4, 6]
    assert profile.encoder == sorted(profile.encoder)  # variances add up
    check_recurrence(model, profile, seed=3)
    with torch.no_grad():
        model.decoder.layers[1].admin.omega[2].mul_(1.001)
    with pytest.raises(AssertionError):
        check_recurrence(model, profile, seed=3)


def test_profile_has_dropout_from_its_seed_only():
    def constants(seed, dropout, ambient):
        model = build(dropout=dropout)
        attach_admin(model)
        torch.manual_seed(ambient)
        return profile_admin(model.eval(), *batch(), seed=seed)

    assert constants(3, 0.3, ambient=1) == constants(3, 0.3, ambient=2)
    assert constants(3, 0.3, ambient=1) != constants(4, 0.3, ambient=1)
    assert constants(3, 0.0, ambient=1) == constants(4, 0.0, ambient=1)


def test_profile_can_be_repeated_and_does_not_depend_on_the_omegas_found():
    model = attached(dropout=0.3)
    first = profile_admin(model, *batch(), seed=3)
    assert profile_admin(model, *batch(), seed=3) == first
    assert first == AdminProfile(*first)


def test_profile_leaves_random_numbers_modes_and_gradients_alone():
    model = attached(dropout=0.3)
    model.eval()
    model.decoder.layers[0].train()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(8)
    state = torch.get_rng_state()
    profile_admin(model, *batch(), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_profile_measures_layers_that_layer_drop_would_skip():
    constants = []
    for probability in (0.0, 0.9):
        model = build(encoder_layerdrop=probability, decoder_layerdrop=probability, dropout=0.0)
        attach_admin(model)
        constants.append(profile_admin(model, *batch(), seed=3))
    assert constants[0] == constants[1]
    for _ in range(5):
        loss_of(model.train(), batch()).backward()  # any subset of the layers runs


def test_failed_profile_leaves_the_omegas_as_they_were():
    model = attached()
    before = {name: omega.clone() for name, omega in omegas(model).items()}
    with torch.no_grad():
        model.encoder.layers[1].fc2.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"--admin-init: profiling gave .*(inf|nan).* for 10"):
        profile_admin(model, *batch(), seed=3)
    for name, omega in omegas(model).items():
        assert torch.equal(omega, before[name])
    assert model.encoder.layers[0].residual_connection == model.encoder.layers[0].admin.combine


def test_profile_needs_attached_weights():
    with pytest.raises(ValueError, match="no ADMIN weights"):
        profile_admin(build(), *batch(), seed=3)


# ------------------------------------------------------------- the ways in which layers are run


def gradients(model, data, seed=4):
    torch.manual_seed(seed)
    model.train().zero_grad()
    loss = loss_of(model, data)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], atol=1e-6, rtol=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(actual[1][name], value, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_activations_give_the_same_gradients(offload):
    plain = attached(dropout=0.2)
    recomputing = attached(dropout=0.2, checkpoint_activations=True, offload_activations=offload)
    assert hasattr(recomputing.encoder.layers[0], "precheckpoint_forward")
    expected = gradients(plain, batch())
    assert_same_gradients(gradients(recomputing, batch()), expected)
    with torch.no_grad():
        recomputing.encoder.layers[1].admin.omega[1].mul_(1.1)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(recomputing, batch()), expected)


def test_profile_is_the_same_with_recomputed_activations():
    plain, recomputing = build(), build(checkpoint_activations=True)
    attach_admin(plain)
    attach_admin(recomputing)
    expected = profile_admin(plain, *batch(), seed=3)
    actual = profile_admin(recomputing, *batch(), seed=3)
    assert [*actual.encoder, *actual.decoder] == pytest.approx(
        [*expected.encoder, *expected.decoder], rel=1e-5
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("place", ["encoder_attn", "fc2"])
def test_exception_inside_a_layer_leaves_no_trace(place, recompute):
    """Raised in another forward, before the backward of the first; the batch after it, too."""
    model = attached(dropout=0.0, checkpoint_activations=recompute)
    expected = gradients(model, batch())
    model.zero_grad()
    loss = loss_of(model, batch())

    def fail(*_):
        raise MemoryError

    hook = getattr(model.decoder.layers[1], place).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        run(model, batch())
    hook.remove()
    loss.backward()
    assert_same_gradients(
        (loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}), expected
    )
    assert_same_gradients(gradients(model, batch()), expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(duplicate, recompute):
    model = attached(dropout=0.0, checkpoint_activations=recompute).eval()
    expected = run(model, batch())
    double = duplicate(model)
    assert torch.equal(run(double, batch()), expected)
    with torch.no_grad():
        for omega in omegas(model).values():
            omega.mul_(2.0)
    assert not torch.allclose(run(model, batch()), expected, atol=1e-3)
    assert torch.equal(run(double, batch()), expected)
    with torch.no_grad():
        for omega in omegas(double).values():
            omega.zero_()
    assert not torch.allclose(run(double, batch()), expected, atol=1e-3)
    assert_same_gradients(gradients(duplicate(model), batch()), gradients(model, batch()))


def test_state_dict_carries_the_profile():
    model, other = build(seed=1), build(seed=2)
    attach_admin(model)
    attach_admin(other)
    profile_admin(model, *batch(), seed=3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other.eval(), batch()), run(model.eval(), batch()))


def test_half_precision_runs_in_half_precision():
    model = attached().to(torch.bfloat16).eval()
    assert run(model, batch()).dtype == torch.bfloat16


@pytest.mark.slow
def test_18_layers_train():
    """18L-18L post-LN; every position of the target is a function of the source."""
    model = build(encoder_layers=18, decoder_layers=18, dropout=0.1)
    attach_admin(model)
    profile = profile_admin(model, *batch(), seed=3)
    assert [len(constants) for constants in profile] == [36, 54]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    losses = []
    torch.manual_seed(0)
    for _ in range(40):
        src = torch.randint(4, 12, (32, 6), generator=generator)
        prev = torch.cat((src.new_full((32, 1), 2), src[:, :-1]), dim=1)
        model.train()
        logits = run(model, (src, prev))
        loss = F.cross_entropy(logits.transpose(1, 2), src)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    moved = [not torch.allclose(w, w[:1].expand_as(w)) for w in omegas(model).values()]
    assert all(moved)


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_normalize_before": True}, r"encoder\.layers\.0 .*--encoder-normalize-before is"),
        ({"decoder_normalize_before": True}, r"decoder\.layers\.0 .*--decoder-normalize-before is"),
        ({"scale_resids": True}, r"decoder\.layers\.0 .*--scale-resids is True"),
        ({"arch": "nonautoregressive_transformer"}, r"NATransformerModel is non-autoregressive"),
    ],
)
def test_unsuitable_models_are_refused_untouched(options, message):
    model = build(**options)
    keys = set(model.state_dict())
    with pytest.raises(ValueError, match=f"--admin-init: {message}"):
        attach_admin(model)
    assert set(model.state_dict()) == keys


def test_other_layers_are_refused():
    model = build()
    decoder_only = nn.ModuleDict({"decoder": model.decoder})
    with pytest.raises(ValueError, match=r"--admin-init: ModuleDict has no stack encoder\.layers"):
        attach_admin(decoder_only)
    model.decoder.layers.insert(1, nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"decoder\.layers\.1 is a Linear.*--base-layers"):
        attach_admin(model)
    assert not hasattr(model.encoder.layers[0], "admin")


def test_second_attachment_is_refused():
    model = attached()
    with pytest.raises(ValueError, match="already"):
        attach_admin(model)


# ---------------------------------------------------------------------------------- training data


def write_side(folder, name, dictionary, sentences, impl):
    """One binarised file; `sentences` are lists of word numbers."""
    prefix = str(folder / name)
    if impl == "raw":
        lines = (" ".join(f"w{i}" for i in sentence) for sentence in sentences)
        Path(prefix).write_text("".join(f"{line}\n" for line in lines))
        return
    kind = "cached" if impl == "lazy" else impl
    builder = indexed_dataset.make_builder(prefix + ".bin", kind, vocab_size=len(dictionary))
    for sentence in sentences:
        indices = [dictionary.index(f"w{i}") for i in sentence] + [dictionary.eos()]
        builder.add_item(torch.IntTensor(indices))
    builder.finalize(prefix + ".idx")


def make_task(folder, impl="mmap", pairs=None, swapped=False, **options):
    if pairs is None:
        pairs = [([i % 30] * (1 + i % 7), [i % 30] * (1 + i % 5)) for i in range(40)]
    folder.mkdir(exist_ok=True)
    dictionary = make_dictionary()
    languages = "en-de" if swapped else "de-en"
    write_side(folder, f"train.{languages}.de", dictionary, [s for s, _ in pairs], impl)
    write_side(folder, f"train.{languages}.en", dictionary, [t for _, t in pairs], impl)
    settings = {"data": str(folder), "train_subset": "train", "dataset_impl": impl,
                "required_seq_len_multiple": 1, **options}  # fmt: skip
    config = TranslationConfig(source_lang="de", target_lang="en", **settings)
    return TranslationTask(config, dictionary, dictionary)


@pytest.mark.parametrize("impl", ["mmap", "cached", "lazy", "raw"])
@pytest.mark.parametrize("swapped", [False, True])
def test_batch_holds_real_pairs_as_the_task_pads_them(tmp_path, impl, swapped):
    task = make_task(tmp_path, impl, swapped=swapped)
    task.load_dataset("train")
    data = task.dataset("train")
    if data.supports_prefetch:
        data.prefetch(range(len(data)))
    stock = {}
    for i in range(len(data)):
        sample = data.collater([data[i]])["net_input"]
        key = tuple(sample["src_tokens"][0].tolist())
        stock.setdefault(key, []).append(sample["prev_output_tokens"][0].tolist())

    src, prev = profiling_batch(task, max_tokens=60)
    assert src.dtype == prev.dtype == torch.int64
    assert len(src) == len(prev) > 5
    assert src.numel() <= 60 >= prev.numel()
    assert any(row[0] == 1 for row in src)
    assert all(row[0] != 1 for row in prev)
    for source, target in zip(src, prev, strict=True):
        target = target[target.ne(1)].tolist()
        assert target in stock[tuple(source[source.ne(1)].tolist())]
        assert target[0] == 2
    again = profiling_batch(make_task(tmp_path, impl, swapped=swapped), max_tokens=60)
    assert torch.equal(again.src_tokens, src)
    assert torch.equal(again.prev_output_tokens, prev)


def test_batch_pads_right_if_the_task_does(tmp_path):
    task = make_task(tmp_path, left_pad_source=False, left_pad_target=True)
    src, prev = profiling_batch(task)
    assert len(src) == 40  # everything fits
    assert src[:, -1].eq(1).any()
    assert not src[:, 0].eq(1).any()
    assert prev[:, 0].eq(1).any()


def test_batch_takes_similar_lengths_that_training_would_take(tmp_path):
    lengths = [1] * 10 + [4] * 20 + [5] * 20 + [30] * 10
    task = make_task(tmp_path, pairs=[([3] * n, [4] * n) for n in lengths], max_source_positions=20)
    src, _ = profiling_batch(task, max_tokens=90)
    assert src.shape[1] == 6
    assert 12 <= len(src) <= 15


def test_batch_comes_from_the_first_folder(tmp_path):
    make_task(tmp_path / "b", pairs=[([7], [7])] * 3)
    task = make_task(tmp_path / "a", pairs=[([5], [6])] * 3)
    task.cfg.data = os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")])
    word = task.source_dictionary.index("w5")
    assert profiling_batch(task).src_tokens.tolist() == [[word, 2]] * 3


def test_no_training_data_no_batch(tmp_path):
    task = make_task(tmp_path)
    for path in tmp_path.glob("train.*"):
        path.rename(path.with_name(path.name.replace("train", "test")))
    assert profiling_batch(task) is None
    assert profiling_batch(argparse.Namespace(cfg=None)) is None


def test_no_usable_pair_is_an_error(tmp_path):
    task = make_task(tmp_path, pairs=[([3] * 30, [4] * 3)] * 5, max_source_positions=20)
    with pytest.raises(ValueError, match=r"first 5 pairs .* 20 source .*--max-source-positions"):
        profiling_batch(task)


def test_profile_of_real_data(tmp_path):
    model = build()
    attach_admin(model)
    profile = profile_admin(model, *profiling_batch(make_task(tmp_path)), seed=1)
    assert all(math.isfinite(s) and s >= 1 for s in [*profile.encoder, *profile.decoder])


# ------------------------------------------------------------------------------------------ ranks

RANK_PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[3])
import test_admin
from fairseq_user_dir import admin

rank = int(sys.argv[1])
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2
)
share = admin._of_first_rank
for admin._of_first_rank in (lambda values: values, share):
    model = test_admin.build(dropout=0.3)
    admin.attach_admin(model)
    # a seed of its own stands for whatever makes the forward passes of ranks differ
    profile = admin.profile_admin(model, *test_admin.batch(), seed=rank)
    print(profile, [omega.tolist() for omega in test_admin.omegas(model).values()])
"""


@pytest.mark.slow
def test_ranks_agree():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, rank, port, str(Path(__file__).parent)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    outputs = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=300)
            assert rank.returncode == 0, err
            outputs.append(out.splitlines())
    finally:
        for rank in ranks:
            rank.kill()
    (alone_0, shared_0), (alone_1, shared_1) = outputs
    assert alone_0 != alone_1  # without the exchange they would differ
    assert shared_0 == shared_1 == alone_0
