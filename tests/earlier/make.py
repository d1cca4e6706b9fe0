"""Writes small checkpoints of every host, family and type, with what they compute.

Run at the commit whose checkpoints are wanted, from the root of its checkout (all paths that
fairseq stores are relative to it):

    git worktree add OLD COMMIT && cp -r tests/earlier OLD/tests/
    cd OLD && python -m tests.earlier.make

and copy what it has written there, hf, fairseq and outputs.safetensors, back. What is there now was
written at commit be8eaf3, by fairseq-fixed 0.12.3.1, transformers 5.23.0 and torch 2.13.0 on a CPU.
`outputs.safetensors` holds inputs and outputs; nothing here is made again when tests run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path("tests/earlier")
TYPES = ("nopos", "sinpos", "abspos", "relpos", "shape", "cape")
CONTEXT = 3  # of relative positions, else their tables are large

# ---- Hugging Face --------------------------------------------------------------------------------

ENCODER = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8}
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
SIZES = {
    "marian": {
        **ENCODER,
        **DECODER,
        "vocab_size": 12,
        "max_position_embeddings": 6,
        "pad_token_id": 11,
        "decoder_start_token_id": 11,
        "eos_token_id": 0,
        "init_std": 0.3,
    },
    "vit": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 3,
        "initializer_range": 0.3,
    },
    "speech_ctc": {
        **ENCODER,
        "vocab_size": 6,
        "num_mel_bins": 4,
        "max_position_embeddings": 3,
        "init_std": 0.3,
    },
    "speech_to_text": {
        **ENCODER,
        **DECODER,
        "vocab_size": 12,
        "conv_channels": 4,
        "input_feat_per_channel": 4,
        "init_std": 0.3,
        "max_source_positions": 6,
        "max_target_positions": 6,
    },
}


def hugging_face_inputs() -> dict[str, dict[str, Tensor]]:
    """Inputs of each family, with padding where there can be some."""
    torch.manual_seed(0)
    ids = torch.randint(1, 11, (2, 7))
    text_mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    features, mask = torch.randn(2, 16, 4), (torch.arange(16) < torch.tensor([[16], [9]])).long()
    speech = {"input_features": features * mask[..., None], "attention_mask": mask}
    targets = torch.randint(1, 11, (2, 5))
    return {
        "marian": {
            "input_ids": ids.where(text_mask.bool(), torch.tensor(11)),
            "attention_mask": text_mask,
            "decoder_input_ids": targets,
        },
        "vit": {"pixel_values": torch.randn(2, 3, 12, 8)},
        "speech_ctc": speech,
        "speech_to_text": {**speech, "decoder_input_ids": targets},
    }


def settings(name: str, family: str) -> dict[str, Any]:
    given: dict[str, Any] = {"type": name}
    if name == "relpos":
        given["relative_context"] = CONTEXT
    if name == "cape" and family == "marian":
        given["source_scale"] = "11/10"
    return given


def write_hugging_face() -> dict[str, Tensor]:
    """One folder a family and type; returns inputs and logits by name."""
    import hf_models

    inputs, stored = hugging_face_inputs(), {}
    for family, values in inputs.items():
        stored.update({f"hf/{family}/{key}": value for key, value in values.items()})
        config_class = next(c for c in hf_models.AUTO_CLASSES if c.model_type == f"cape_{family}")
        model_class = list(hf_models.AUTO_CLASSES[config_class].values())[-1]
        for name in TYPES:
            torch.manual_seed(1)
            config = config_class(
                **SIZES[family],
                position_embedding=settings(name, family),
                attn_implementation="eager",
            )
            model = model_class(config).eval()
            model.save_pretrained(FOLDER / "hf" / f"{family}-{name}")
            (FOLDER / "hf" / f"{family}-{name}" / "README.md").unlink()
            with torch.no_grad():
                stored[f"hf/{family}/{name}"] = model(**values).logits.contiguous()
    return stored


# ---- fairseq -------------------------------------------------------------------------------------

WORDS = ("a", "b", "c", "d", "e", "f")
SIDES = ("encoder", "decoder")
TINY = [
    word
    for side in SIDES
    for word in (
        *(f"--{side}-layers", "1", f"--{side}-embed-dim", "8"),
        *(f"--{side}-ffn-embed-dim", "8", f"--{side}-attention-heads", "2"),
    )
]
TRAIN = (
    *("--optimizer", "adam", "--lr", "0.01", "--max-update", "3", "--cpu", "--no-progress-bar"),
    *("--num-workers", "0", "--no-epoch-checkpoints", "--disable-validation", "--seed", "1"),
    *("--user-dir", "cape_plugins", "--required-batch-size-multiple", "1"),
)
# name: (data, architecture, flags)
TEXT_TASK = ("--batch-size", "8", "--max-source-positions", "20", "--max-target-positions", "20")
RUNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{f"translation-{name}": ("text", "cape_transformer_tiny", (*TINY, *TEXT_TASK))
       for name in TYPES},
    **{f"lm-{name}": ("lm", "cape_transformer_lm", (
        *TINY[8:], "--decoder-input-dim", "8", "--decoder-output-dim", "8",
        "--task", "language_modeling", "--batch-size", "8", "--tokens-per-sample", "16"))
       for name in ("sinpos", "cape")},
    **{f"ctc-{name}": ("speech", "cape_ctc_transformer_tiny", (
        *TINY[:8], "--task", "cape_asr", "--criterion", "cape_ctc", "--max-tokens", "500",
        "--input-feat-per-channel", "8"))
       for name in TYPES},
    **{f"s2t-{name}": ("speech", "cape_s2t_transformer_xs", (
        *TINY[:10], *TINY[12:], "--conv-channels", "8",
        "--task", "cape_asr", "--max-tokens", "500"))
       for name in ("abspos", "cape")},
}  # fmt: skip


def write_data() -> None:
    """Binarised text and a manifest of noise."""
    text = FOLDER / "text"
    text.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        for side in ("xx", "yy"):
            rows = [" ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(8)]
            (text / f"{split}.{side}").write_text("\n".join(rows) + "\n")
    run(
        "fairseq-preprocess", "-s", "xx", "-t", "yy", "--trainpref", str(text / "train"),
        "--validpref", str(text / "valid"), "--destdir", str(FOLDER / "fairseq" / "text"),
        "--joined-dictionary", "--workers", "1",
    )  # fmt: skip
    run(
        "fairseq-preprocess", "--only-source", "--trainpref", str(text / "train.xx"),
        "--destdir", str(FOLDER / "fairseq" / "lm"), "--workers", "1",
    )  # fmt: skip
    for log in (FOLDER / "fairseq").glob("*/preprocess.log"):
        log.unlink()
    shutil.rmtree(text)
    speech = FOLDER / "fairseq" / "speech"
    speech.mkdir()
    lines = ["id\taudio\ttgt_text"]
    for number in range(3):
        samples = (rng.normal(0, 0.1, 6400 + 800 * number) * 32767).astype("<i2")
        with wave.open(str(speech / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.tobytes())
        lines.append(f"{number}\t{number}.wav\t{('a b', 'b a', 'ab')[number]}")
    (speech / "train.tsv").write_text("\n".join(lines) + "\n")


def run(*command: str) -> None:
    script = "from fairseq_cli import {0}; {0}.cli_main()"
    name = command[0].removeprefix("fairseq-")
    subprocess.run([sys.executable, "-c", script.format(name), *command[1:]], check=True)


def write_fairseq() -> dict[str, Tensor]:
    """One checkpoint a run; returns inputs and outputs by name."""
    (FOLDER / "fairseq").mkdir()
    write_data()
    stored = fairseq_inputs()
    for name, (data, arch, words) in RUNS.items():
        position = name.split("-")[1]
        context = ("--position-relative-context", str(CONTEXT)) if position == "relpos" else ()
        save_dir = FOLDER / "runs" / name
        run(
            "fairseq-train", str(FOLDER / "fairseq" / data), "--arch", arch, *words, *TRAIN,
            "--position-embedding", position, *context, "--save-dir", str(save_dir),
        )  # fmt: skip
        shutil.copy(save_dir / "checkpoint_last.pt", FOLDER / "fairseq" / f"{name}.pt")
        stored[f"fairseq/{name}"] = fairseq_output(name, stored)
    shutil.rmtree(FOLDER / "runs")
    return stored


def fairseq_inputs() -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {
        "fairseq/source": torch.tensor([[4, 5, 6, 7, 8, 2], [1, 1, 9, 5, 4, 2]]),
        "fairseq/lengths": torch.tensor([6, 4]),
        "fairseq/previous": torch.tensor([[2, 4, 5, 6], [2, 7, 8, 4]]),
        "fairseq/features": torch.randn(2, 24, 80),
        "fairseq/frames": torch.tensor([24, 17]),
    }


@torch.no_grad()
def fairseq_output(name: str, inputs: dict[str, Tensor]) -> Tensor:
    """What the checkpoint of this name computes, loaded as fairseq's commands do."""
    from fairseq.checkpoint_utils import load_model_ensemble_and_task

    import fairseq_user_dir  # noqa: F401 registers the architectures

    path, data = FOLDER / "fairseq" / f"{name}.pt", FOLDER / "fairseq" / RUNS[name][0]
    (model,), _, _ = load_model_ensemble_and_task([str(path)], {"data": str(data)})
    model.eval()
    given = {key.removeprefix("fairseq/"): value for key, value in inputs.items()}
    if name.startswith("lm"):
        return model(given["previous"])[0]
    if name.startswith("translation"):
        return model(given["source"], given["lengths"], given["previous"])[0]
    if name.startswith("ctc"):
        return model(given["features"][..., :8], given["frames"])["encoder_out"].contiguous()
    units = given["previous"].clamp(max=6)  # of the manifest's seven
    return model(given["features"], given["frames"], units)[0]


def main() -> None:
    for part in ("hf", "fairseq", "runs", "text"):
        shutil.rmtree(FOLDER / part, ignore_errors=True)
    stored = {**write_hugging_face(), **write_fairseq()}
    # no two may share memory, as the inputs of the speech models do
    stored = {name: value.clone().contiguous() for name, value in stored.items()}
    save_file(stored, FOLDER / "outputs.safetensors")


if __name__ == "__main__":
    main()
