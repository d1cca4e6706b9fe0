"""ADMIN: the batch it is profiled on, and agreement of ranks."""

import argparse
import os
from pathlib import Path

import pytest
import torch
from fairseq.data import indexed_dataset
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import distributed
from torch.multiprocessing import start_processes

from fairseq_user_dir import admin
from fairseq_user_dir.admin import profiling_batch
from tests.support.admin import batch, build, omegas
from tests.support.fairseq_models import make_dictionary


def write_side(folder, name, dictionary, sentences, impl):
    """One binarised file; `sentences` are lists of word numbers."""
    prefix = str(folder / name)
    if impl == "raw":
        lines = (" ".join(f"w{i}" for i in sentence) for sentence in sentences)
        Path(prefix).write_text("".join(f"{line}\n" for line in lines))
        return
    stored_as = "cached" if impl == "lazy" else impl
    builder = indexed_dataset.make_builder(prefix + ".bin", stored_as, vocab_size=len(dictionary))
    for sentence in sentences:
        indices = [dictionary.index(f"w{i}") for i in sentence] + [dictionary.eos()]
        builder.add_item(torch.IntTensor(indices))
    builder.finalize(prefix + ".idx")


def make_task(folder, impl="mmap", pairs=None, swapped=False, **options):
    if pairs is None:
        pairs = [([i % 20] * (1 + i % 7), [i % 20] * (1 + i % 5)) for i in range(40)]
    folder.mkdir(exist_ok=True)
    dictionary = make_dictionary()
    languages = "en-de" if swapped else "de-en"
    write_side(folder, f"train.{languages}.de", dictionary, [s for s, _ in pairs], impl)
    write_side(folder, f"train.{languages}.en", dictionary, [t for _, t in pairs], impl)
    settings = {"data": str(folder), "train_subset": "train", "dataset_impl": impl,
                "required_seq_len_multiple": 1, **options}  # fmt: skip
    config = TranslationConfig(source_lang="de", target_lang="en", **settings)
    return TranslationTask(config, dictionary, dictionary)


@pytest.mark.parametrize(
    ("impl", "swapped"), [("mmap", False), ("cached", False), ("lazy", True), ("raw", True)]
)
def test_batch_holds_real_pairs_as_the_task_pads_them(tmp_path, impl, swapped):
    task = make_task(tmp_path, impl, swapped=swapped)
    task.load_dataset("train")
    data = task.dataset("train")
    if data.supports_prefetch:
        data.prefetch(range(len(data)))
    pairs = set()
    for i in range(len(data)):
        sample = data.collater([data[i]])["net_input"]
        pairs.add(
            tuple(str(sample[side].tolist()) for side in ("src_tokens", "prev_output_tokens"))
        )
    src, prev = profiling_batch(task, max_tokens=60)
    assert src.dtype == prev.dtype == torch.int64
    assert len(src) == len(prev) > 5
    assert src.numel() <= 60 >= prev.numel()
    assert src[:, 0].eq(1).any()
    assert prev[:, 0].eq(2).all()
    for row in zip(src, prev, strict=True):
        assert tuple(str([tokens[tokens.ne(1)].tolist()]) for tokens in row) in pairs
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


def profile_of_rank(rank, folder):
    """Writes the profile of this rank and the one that ranks share."""
    url = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    share, results = admin._of_first_rank, []
    for admin._of_first_rank in (lambda values: values, share):
        model = build(dropout=0.3)
        admin.attach_admin(model)
        # a seed for each rank stands for whatever makes the forward passes of ranks differ
        profile = admin.profile_admin(model, *batch(), seed=rank)
        results.append(f"{profile} {[omega.tolist() for omega in omegas(model).values()]}\n")
    (folder / f"{rank}").write_text("".join(results))
    distributed.barrier()
    distributed.destroy_process_group()


def test_ranks_share_the_profile_of_the_first(tmp_path):
    start_processes(profile_of_rank, (tmp_path,), nprocs=2, start_method="fork")
    ranks = [(tmp_path / f"{rank}").read_text().splitlines() for rank in (0, 1)]
    (alone_0, shared_0), (alone_1, shared_1) = ranks
    assert alone_0 != alone_1  # without the exchange they would differ
    assert shared_0 == shared_1 == alone_0
