"""The method `generate` of `CapeMarianMTModel`."""

from functools import partial
from pathlib import Path

import torch

from benchmarks.engines.task import EOS, PAD, Search, Step, source_ids
from hf_models import CapeMarianConfig, CapeMarianMTModel

FOLDER = "hugging_face"


def translator(folder: Path, search: Search) -> Step:
    """The method of transformers."""
    torch.set_num_threads(search.threads)
    model = CapeMarianMTModel.from_pretrained(folder / FOLDER).eval()
    ids = torch.from_numpy(source_ids(folder, search))
    return partial(
        model.generate,
        input_ids=ids,
        attention_mask=ids.ne(PAD).long(),
        num_beams=search.beam,
        min_new_tokens=search.length,
        max_new_tokens=search.length,
        max_length=None,
        do_sample=False,
    )


def save(folder: Path, sizes: dict[str, int], vocabulary: int, alpha: float) -> None:
    """Writes a model with the sizes and special tokens of the checkpoint."""
    names = {"layers": "layers", "attention-heads": "attention_heads", "ffn-embed-dim": "ffn_dim"}
    sides = {f"{side}_{name}": sizes[flag] for side in ("encoder", "decoder")
             for flag, name in names.items()}  # fmt: skip
    special = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": EOS}
    config = CapeMarianConfig(
        **sides,
        **special,
        vocab_size=vocabulary,
        d_model=sizes["embed-dim"],
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
        activation_function="relu",
        scale_embedding=True,
        position_embedding={"type": "cape", "source_scale": alpha},
    )
    torch.manual_seed(0)
    CapeMarianMTModel(config).save_pretrained(folder / FOLDER)
