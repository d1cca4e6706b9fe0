"""Writes the golden files: a tiny model of each host and kind of family, with its outputs.

    python -m tests.golden.make          # from the root of the repository, on a CPU

The stored files were made by version 0.2.0, with fairseq-fixed 0.12.3.1, transformers 5.23.0 and
torch 2.13.0. Each later version has to load it and to compute the same, so these files are made
again only for a reason that CHANGELOG.md gives. Tests make nothing: they use the functions here
that load and compute.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import hf_models  # noqa: F401 registers the model types
from cape_plugins import (
    PositionConfig,
    __version__,
    build_position_encoder,
    frame_positions,
    patch_positions,
    token_positions,
)
from cape_plugins.mathematics.encoder import SIDES
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.registry import types_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"
OUTPUTS = FOLDER / "outputs.safetensors"  # inputs and outputs; settings are its metadata
Values = dict[str, Tensor]

BATCH, DIM, SEED = 3, 8, 16
LENGTHS = (7, 5, 1), (4, 6, 2)  # tokens of each sample, of source and target
FRAMES, HOPS = (6, 4, 1), (0.03, 0.02, 0.04)
GRID = (2, 3)
TEXT = {"source_scale": "11/10"}
APART = {"synchronize": False, "max_global_scale": 1.3}  # by default text is not scaled


def position_cases() -> Iterator[tuple[str, PositionConfig]]:
    """Each type in each domain, where it adds to the content; and what defaults leave out."""
    for domain, row in DOMAINS.items():
        architecture = "seq2seq" if domain == "text" else row.architecture
        for name in types_of(architecture, domain):
            config = PositionConfig(name, domain, architecture)
            scaled = TEXT if config.source_scale == "auto" else {}
            if config.encoding.adds:
                yield f"{name}-{domain}", config.replace(**scaled)
    for name, more in (("cape", APART), ("shape", {"synchronize": True})):
        settings = {**TEXT, **more}
        yield f"{name}-text-drawn", PositionConfig(name, "text", "seq2seq", **settings)


def positions(config: PositionConfig) -> Values:
    """What is added to each side in training, from a fixed seed, and in evaluation."""
    if config.domain == "text":
        rows = [torch.arange(max(n)) < torch.tensor(n)[:, None] for n in LENGTHS]
        raw = [token_positions(valid) for valid in rows]
    elif config.domain == "audio":
        raw = [frame_positions(torch.tensor(FRAMES), torch.tensor(HOPS))]
    else:
        raw = [patch_positions(*GRID)]
    sides = SIDES[: len(raw)]
    encoders = [build_position_encoder(config, DIM, side=side, start=2.0) for side in sides]
    for encoder in encoders:
        for table in encoder.parameters():
            table.data = torch.linspace(-1, 1, table.numel()).view_as(table)
    torch.manual_seed(SEED)
    draws = [encoders[0].draw(BATCH)]
    if config.synchronize:
        draws = [draws[0].covering(*map(torch.tensor, LENGTHS))]
    for encoder in encoders[1:]:
        draws.append(draws[0] if config.synchronize else encoder.draw(BATCH, partner=draws[0]))
    values = {}
    for side, encoder, steps, draw in zip(sides, encoders, raw, draws, strict=True):
        values[f"{side}/training"] = encoder(steps, draw).detach()
        values[f"{side}/evaluation"] = encoder.eval()(steps).detach()
    values["next"] = torch.rand(2)  # shows how many random numbers were drawn
    return values


ENCODER = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8}
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
ONE_STACK = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
ONE_STACK |= {"intermediate_size": 8, "initializer_range": 0.3}
# Folder: Auto class, model type, settings of positions, sizes
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "marian": (
        "AutoModelForSeq2SeqLM",
        "cape_marian",
        {"type": "cape", **TEXT},
        {**ENCODER, **DECODER, "vocab_size": 12, "max_position_embeddings": 6, "init_std": 0.3}
        | {"pad_token_id": 11, "decoder_start_token_id": 11, "eos_token_id": 0},
    ),
    "llama": (
        "AutoModelForCausalLM",
        "cape_llama",
        {"type": "cape", "max_global_scale": 1.5},
        {**ONE_STACK, "num_key_value_heads": 2, "vocab_size": 12, "max_position_embeddings": 6},
    ),
    "vit": (
        "AutoModelForImageClassification",
        "cape_vit",
        {"type": "abspos", "relative_context": 2},
        {**ONE_STACK, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
    "speech_to_text": (
        "AutoModelForSpeechSeq2Seq",
        "cape_speech_to_text",
        {"type": "shape", "max_offset": 20},
        {**ENCODER, **DECODER, "vocab_size": 12, "conv_channels": 4, "init_std": 0.3}
        | {"input_feat_per_channel": 4, "max_source_positions": 6, "max_target_positions": 6},
    ),
}


def model_inputs() -> dict[str, Values]:
    """Inputs of each folder, longer than its tables, with padding where there can be some."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 11, (2, 7), generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    frames = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    features = torch.randn(2, 16, 4, generator=generator) * frames[..., None]
    targets = torch.randint(1, 11, (2, 5), generator=generator)
    text = {"input_ids": ids.where(mask.bool(), torch.tensor(11)), "attention_mask": mask}
    speech = {"input_features": features, "attention_mask": frames}
    return {
        "marian": {**text, "decoder_input_ids": targets},
        "llama": {"input_ids": ids},
        "vit": {"pixel_values": torch.randn(2, 3, 12, 8, generator=generator)},
        "speech_to_text": {**speech, "decoder_input_ids": targets},
    }


def save_model(name: str) -> None:
    """Writes a folder of two files."""
    auto, model_type, settings, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **sizes, position_embedding=settings)
    torch.manual_seed(1)
    getattr(transformers, auto).from_config(config).save_pretrained(FOLDER / name)
    for file in (FOLDER / name).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


def load_model(name: str) -> tuple[Any, dict[str, Any]]:
    """The model of a folder, and what transformers says of its parameters."""
    auto = getattr(transformers, MODELS[name][0])
    return auto.from_pretrained(FOLDER / name, output_loading_info=True)


WORDS = ("a", "b", "c", "d", "e", "f")
TINY = {
    side: f"--{side}-layers 1 --{side}-embed-dim 8 --{side}-ffn-embed-dim 8 "
    f"--{side}-attention-heads 2"
    for side in ("encoder", "decoder")
}
TRAIN = (
    "--optimizer adam --lr 0.01 --cpu --no-progress-bar --num-workers 0 --no-epoch-checkpoints "
    "--disable-validation --seed 1 --user-dir cape_plugins --required-batch-size-multiple 1"
)
# Checkpoint, and data folder of the same name: architecture, flags
RUNS = {
    "translation": (
        "cape_transformer_tiny",
        f"{TINY['encoder']} {TINY['decoder']} --batch-size 8 --max-source-positions 20 "
        "--max-target-positions 20 --source-lang xx --target-lang yy --position-embedding abspos "
        "--position-relative-context 3",
    ),
    "language": (
        "cape_transformer_lm",
        f"{TINY['decoder']} --decoder-input-dim 8 --decoder-output-dim 8 --no-save-optimizer-state "
        "--task language_modeling --batch-size 8 --tokens-per-sample 16 --position-embedding cape",
    ),
    "ctc": (
        "cape_ctc_transformer_tiny",
        f"{TINY['encoder']} --task cape_asr --criterion cape_ctc --max-tokens 500 "
        "--input-feat-per-channel 8 --no-save-optimizer-state --position-embedding cape",
    ),
}


def write_dictionaries(folder: Path) -> None:
    """The data folders as far as a checkpoint needs them to load."""
    text = "".join(f"{word} 1\n" for word in WORDS)
    units = "a 1\nb 1\n| 1\n"
    files = {"translation/dict.xx.txt": text, "translation/dict.yy.txt": text}
    for file, content in {**files, "language/dict.txt": text, "ctc/dict.txt": units}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)


def write_data(folder: Path) -> None:
    """Binarised text of random words, and recordings of noise."""
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    write_dictionaries(folder)
    rng = np.random.default_rng(0)
    for name in ("translation/train.xx-yy.xx", "translation/train.xx-yy.yy", "language/train"):
        builder = MMapIndexedDatasetBuilder(str(folder / f"{name}.bin"), np.int32)
        for _ in range(8):
            builder.add_item(torch.tensor([*rng.integers(4, 10, rng.integers(2, 7)), 2]))
        builder.finalize(str(folder / f"{name}.idx"))
    lines = ["id\taudio\ttgt_text"]
    for number, text in enumerate(("a b", "b a", "ab")):
        with wave.open(str(folder / f"ctc/{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            noise = rng.normal(0, 0.1, 6400 + 800 * number)
            file.writeframes((noise * 32767).astype("<i2").tobytes())
        lines.append(f"{number}\t{number}.wav\t{text}")
    (folder / "ctc/train.tsv").write_text("\n".join(lines) + "\n")


def train_words(name: str, data: Path, save_dir: Path, updates: int) -> list[str]:
    """Flags of fairseq-train."""
    arch, flags = RUNS[name]
    words = f"{data / name} --arch {arch} --save-dir {save_dir} --max-update {updates}"
    return f"{words} {flags} {TRAIN}".split()


def save_checkpoints() -> None:
    """Trains each for three updates; a checkpoint says the paths that it was made with, so these
    are relative to the root."""
    program = "from fairseq_cli import train; train.cli_main()"
    build = Path("build/golden")
    shutil.rmtree(ROOT / build, ignore_errors=True)
    write_data(ROOT / build)
    for name in RUNS:
        words = train_words(name, build, build / f"{name}-run", updates=3)
        subprocess.run([sys.executable, "-c", program, *words], check=True, cwd=ROOT)
        shutil.copy(ROOT / build / f"{name}-run/checkpoint_last.pt", FOLDER / f"{name}.pt")
    shutil.rmtree(ROOT / build)


def checkpoint_inputs() -> dict[str, Values]:
    """Inputs of each checkpoint, in the order of the model's arguments."""
    source = torch.tensor([[4, 5, 6, 7, 8, 2], [1, 1, 9, 5, 4, 2]])  # padded on the left
    previous = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 4]])
    features = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(2))
    return {
        "translation": {
            "src_tokens": source,
            "src_lengths": torch.tensor([6, 4]),
            "prev_output_tokens": previous,
        },
        "language": {"src_tokens": previous},
        "ctc": {"src_tokens": features, "src_lengths": torch.tensor([24, 17])},
    }


def load_checkpoint(name: str, data: Path) -> Any:
    """The model, loaded as the commands of fairseq load it."""
    from fairseq.checkpoint_utils import load_model_ensemble_and_task

    import fairseq_user_dir  # noqa: F401 registers the architectures

    overrides = {"data": str(data / name)}
    (model,), _, _ = load_model_ensemble_and_task([str(FOLDER / f"{name}.pt")], overrides)
    return model.eval()


@torch.no_grad()
def compute(model: Any, inputs: Values) -> Tensor:
    """Logits of a model of either host in evaluation."""
    output = model.eval()(**inputs)
    if isinstance(output, tuple):
        return output[0]
    return output["logits" if "logits" in output else "encoder_out"].contiguous()


def stored_settings(model: Any) -> dict[str, Any]:
    """All settings of the main position embedding, defaults included."""
    from fairseq_user_dir.checkpoints import position_config

    config = position_config(model) or model.config.position_config
    return config.to_dict()


def main() -> None:
    stored, settings = {}, {}
    for name, config in position_cases():
        settings[name] = {"domain": config.domain, "architecture": config.architecture}
        settings[name] |= config.to_dict()
        stored |= {f"{name}/{key}": value for key, value in positions(config).items()}
    for name in MODELS:
        save_model(name)
    save_checkpoints()
    write_dictionaries(data := ROOT / "build/golden")
    models = {name: load_model(name)[0] for name in MODELS}
    models |= {name: load_checkpoint(name, data) for name in RUNS}
    shutil.rmtree(data)
    for name, values in {**model_inputs(), **checkpoint_inputs()}.items():
        settings[name] = stored_settings(models[name])
        stored |= {f"{name}/inputs/{key}": value.clone() for key, value in values.items()}
        stored[f"{name}/outputs"] = compute(models[name], values)
    texts = {name: json.dumps(of_case) for name, of_case in settings.items()}
    # tensors that share memory are refused
    stored = {name: value.clone().contiguous() for name, value in stored.items()}
    save_file(stored, OUTPUTS, {**texts, "version": __version__})


if __name__ == "__main__":
    main()
