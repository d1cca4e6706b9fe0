"""Recordings, manifests and small speech models for the tests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from cape_plugins import TYPES as REGISTRY
from fairseq_user_dir.asr.task import CapeAsrTask

RATE = 16000
TEXTS = ("a b", "a b c", "ab", "c c", "ba cab")
SIZES = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_embed_dim": 16,
    "conv_channels": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feature_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "input_feat_per_channel": 8,
    "abspos_frames": 7,
}
TYPES = {name: {"position_embedding": name} for name in REGISTRY}
TYPES["relpos"]["position_relative_context"] = 3
CTC, S2T = "cape_ctc_transformer", "cape_s2t_transformer_xs"
SEQ2SEQ = "cape_seq2seq_transformer_tiny"


def write_manifest(folder: Path, split: str, seconds: list[float], seed: int = 0) -> Path:
    """Noise of these durations in wav files, and SPLIT.tsv."""
    rng = np.random.default_rng(seed)
    (folder / split).mkdir(parents=True)
    lines = ["id\taudio\ttgt_text"]
    for n, duration in enumerate(seconds):
        name = f"{split}/{n:03}.wav"
        soundfile.write(folder / name, rng.normal(0, 0.1, int(duration * RATE)), RATE)
        lines.append(f"{split}-{n}\t{name}\t{TEXTS[n % len(TEXTS)]}")
    (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder / f"{split}.tsv"


def durations(count: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).uniform(0.4, 1.6, count).round(3).tolist()


def make_task(folder: Path, *words: str, **settings: Any) -> CapeAsrTask:
    """The task as a command line sets it up."""
    parser = argparse.ArgumentParser()
    CapeAsrTask.add_args(parser)
    args = parser.parse_args([str(folder), *words])
    vars(args).update({"seed": 1, "input_feat_per_channel": 8, "train_subset": "train", **settings})
    return CapeAsrTask.setup_task(args)


def training_set(folder: Path, *words: str, epoch: int = 1) -> Any:
    """The training data of a task with these flags."""
    task = make_task(folder, *words)
    task.load_dataset("train")
    task.dataset("train").set_epoch(epoch)
    return task.dataset("train")


def make_model(task: CapeAsrTask, arch: str, name: str = "cape", **settings: Any) -> Any:
    """A small model with the same parameters for the same settings."""
    args = argparse.Namespace(arch=arch, **{**SIZES, **TYPES.get(name, {}), **settings})
    args.max_source_positions, args.max_target_positions = 1000, 100
    ARCH_CONFIG_REGISTRY[arch](args)
    args.input_feat_per_channel, args.input_channels = 8, 1
    torch.manual_seed(1)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task)


def part(sample: dict[str, Any], row: int) -> dict[str, Any]:
    """One sample of a batch, without its padding."""
    inputs = sample["net_input"]
    length, units = int(inputs["src_lengths"][row]), int(sample["target_lengths"][row])
    rows = slice(row, row + 1)
    single = {key: value[rows] for key, value in inputs.items()}
    for key in ("src_tokens", "frame_nanoseconds"):
        if key in single:
            single[key] = single[key][:, :length]
    single["prev_output_tokens"] = single["prev_output_tokens"][:, :units]
    return {
        **{key: sample[key][rows] for key in ("id", "target_lengths", "texts")},
        "net_input": single,
        "target": sample["target"][rows, :units],
        "ntokens": units,
        "nsentences": 1,
    }
