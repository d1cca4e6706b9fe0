"""fairseq's beam search on a checkpoint of `cape_transformer`."""

import warnings
from pathlib import Path

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_user_dir  # noqa: F401
from benchmarks.engines.task import EOS, PAD, Search, Step, source_ids
from benchmarks.translation import beam_search

CHECKPOINT = "checkpoint.pt"


def translator(folder: Path, search: Search) -> Step:
    """fairseq's beam search on the checkpoint, prepared as in fairseq-generate."""
    torch.set_num_threads(search.threads)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / CHECKPOINT)], arg_overrides={"data": str(folder)}
    )
    model.eval().make_generation_fast_()
    ids = [row[row != PAD] for row in torch.from_numpy(source_ids(folder, search))]
    sample = {
        "net_input": {
            "src_tokens": collate_tokens(ids, PAD, EOS, left_pad=True),
            "src_lengths": torch.tensor([len(row) for row in ids]),
        }
    }
    # fairseq makes one more step than the length, for </s>
    return beam_search(task, model, sample, search.length - 1, search.beam)


def save(folder: Path, sizes: dict[str, int], num_words: int, alpha: str) -> int:
    """Writes dictionaries and a checkpoint, as fairseq-train. Returns the number of parameters."""
    dictionary = Dictionary()
    for number in range(num_words):
        dictionary.add_symbol(str(number))
    for language in ("source", "target"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    sides = [f"--{side}-{name}={size}" for side in ("encoder", "decoder")
             for name, size in sizes.items()]  # fmt: skip
    positions = ["--position-embedding", "cape", "--position-source-scale", alpha]
    argv = [str(folder), "--arch", "cape_transformer", "--share-all-embeddings", *sides, *positions]
    argv += ["--source-lang", "source", "--target-lang", "target", "--max-tokens", "1"]
    parser = options.get_training_parser("translation")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns of deprecations
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))
    torch.manual_seed(0)
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    state = {"args": None, "cfg": cfg, "model": model.state_dict()}
    state["optimizer_history"] = [{**history, "num_updates": 1}]
    state["extra_state"] = {"train_iterator": {"epoch": 1}}
    torch.save(state, folder / CHECKPOINT)
    return sum(parameter.numel() for parameter in model.parameters())
