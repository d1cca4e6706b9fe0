"""Tiny untrained translation models of both hosts, in the folders that the recipes leave."""

import json
from pathlib import Path

import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_user_dir  # noqa: F401 registers the architectures
from cape_plugins import PositionConfig
from recipes.lab.subwords import SentencePiece
from recipes.mt.number_lists import make_number_lists, spell

LANGUAGES = ("en", "de")
SIZES = {"layers": 2, "attention-heads": 2, "embed-dim": 32, "ffn-embed-dim": 48}
ALPHA = "1.25"


def flags_of(name: str, architecture: str = "seq2seq", rows: int = 12) -> tuple[str, ...]:
    """Flags of a type of position embedding, beside its own defaults.

    Args:
        name: Of the type.
        architecture: Of the model.
        rows: Of learned tables.
    """
    flags = ("--position-embedding", name)
    config = PositionConfig(name, "text", architecture)
    if config.encoding.counts:
        sides = {"seq2seq": ("source", "target"), "decoder": ("target",)}[architecture]
        flags += tuple(word for side in sides for word in (f"--max-{side}-positions", str(rows)))
    if config.encoding.relative:
        flags += ("--position-relative-context", "4")
    if config.source_scale == "auto":
        flags += ("--position-source-scale", ALPHA)
    return flags


class TinyModels:
    """One corpus and models of every type with either host, each made when it is asked for.

    Args:
        folder: For all of them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.corpus = write_corpus(folder / "data")
        self.test_options = ["--test", *(str(self.corpus / f"test.{code}") for code in LANGUAGES)]

    def pairs(self) -> list[tuple[str, str]]:
        sides = [
            (self.corpus / f"test.{code}").read_text("utf-8").splitlines() for code in LANGUAGES
        ]
        return list(zip(*sides, strict=True))

    def sources(self) -> list[str]:
        return [source for source, _ in self.pairs()]

    def fairseq(self, position: str, seed: int = 1) -> Path:
        path = self.folder / "runs" / f"{position}-seed{seed}" / "checkpoint_last.pt"
        flags = flags_of(position, rows=64)
        return path if path.exists() else save_fairseq(self.corpus, path, *flags, seed=seed)

    def hf(self, position: str, seed: int = 1) -> Path:
        """The same parameters."""
        path = self.folder / "hf" / f"{position}-seed{seed}"
        if path.exists():
            return path
        return copy_to_hugging_face(self.corpus, self.fairseq(position, seed), path)


def write_corpus(folder: Path) -> Path:
    """Writes what the quickstart leaves: text, ``sentencepiece.model``, ``binary``."""
    lists = make_number_lists(0, {"train": 80, "valid": 1, "test": 24})
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        for language in LANGUAGES:
            lines = [f"{spell(numbers, language)}." for numbers in lists[split]]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [folder / f"train.{language}" for language in LANGUAGES]
    subwords = SentencePiece.train(files, folder / "sentencepiece.model", 60)
    dictionary = Dictionary()
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            for piece in subwords.encode(line).split():
                dictionary.add_symbol(piece)
    (folder / "binary").mkdir()
    for language in LANGUAGES:
        dictionary.save(str(folder / "binary" / f"dict.{language}.txt"))
    return folder


def save_fairseq(
    corpus: Path, path: Path, *flags: object, seed: int = 1, shared: bool = True
) -> Path:
    """A checkpoint as fairseq writes it, of the architecture and with the `flags` given; encoder,
    decoder and projection share one embedding, if `shared`."""
    words = [f"--{side}-{name}={value}" for side in ("encoder", "decoder")
             for name, value in SIZES.items()]  # fmt: skip
    arch = [] if "--arch" in flags else ["--arch", "cape_transformer"]
    argv = [*arch, *words, *(["--share-all-embeddings"] if shared else []), *map(str, flags)]
    argv += ["--source-lang", "en", "--target-lang", "de", "--max-tokens", "100"]
    return _save("translation", [str(corpus / "binary"), *argv], path, seed)


def save_language_model(data: Path, path: Path, *flags: object, seed: int = 1) -> Path:
    """The same of a language model with the dictionary in `data`."""
    words = [f"--decoder-{name}={value}" for name, value in SIZES.items()]
    argv = [str(data), "--arch", "cape_transformer_lm", *words, *map(str, flags)]
    argv += ["--tokens-per-sample", "64", "--max-tokens", "100"]
    return _save("language_modeling", argv, path, seed)


def _save(task: str, argv: list[str], path: Path, seed: int) -> Path:
    parser = options.get_training_parser(task)
    argv = [*argv, "--task", task]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))
    torch.manual_seed(seed)
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    with torch.no_grad():  # else a model that is not trained gives all tokens much the same score
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path.parent.mkdir(parents=True, exist_ok=True)
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    history |= {"lr_scheduler_state": {}, "num_updates": 1}
    state = {"args": None, "cfg": cfg, "model": model.state_dict(), "optimizer_history": [history]}
    torch.save({**state, "extra_state": {"train_iterator": {"epoch": 1}}}, path)
    return path


def save_tokenizer(corpus: Path, folder: Path) -> None:
    """Marian's, with the numbers of fairseq's dictionary."""
    from transformers import MarianTokenizer

    dictionary = Dictionary.load(str(corpus / "binary" / "dict.en.txt"))
    vocabulary = folder / "numbers.json"
    vocabulary.write_text(json.dumps(dictionary.indices), encoding="utf-8")
    model = str(corpus / "sentencepiece.model")
    MarianTokenizer(source_spm=model, target_spm=model, vocab=str(vocabulary)).save_pretrained(
        folder
    )


def copy_to_hugging_face(corpus: Path, checkpoint: Path, folder: Path, stock: bool = False) -> Path:
    """A folder of cape_marian (or stock Marian) with the parameters of a fairseq checkpoint."""
    from transformers import MarianConfig, MarianMTModel

    from hf_models import CapeMarianConfig, CapeMarianMTModel

    state = torch.load(checkpoint, weights_only=True)
    settings = state["cfg"].model
    names = {"layers": "layers", "attention_heads": "attention_heads", "ffn_embed_dim": "ffn_dim"}
    sizes = {f"{side}_{ours}": getattr(settings, f"{side}_{theirs}")
             for side in ("encoder", "decoder") for theirs, ours in names.items()}  # fmt: skip
    words = state["model"]["encoder.embed_tokens.weight"]
    sizes |= {"vocab_size": len(words), "d_model": words.shape[1], "scale_embedding": True}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None}
    special["decoder_start_token_id"] = 2  # as fairseq
    common = {**sizes, **special, "activation_function": "relu", "dropout": 0.0}
    if stock:
        model = MarianMTModel(MarianConfig(**common))
    else:
        position = {"type": settings.position_embedding}
        for name in ("relative_context", "source_scale"):
            value = getattr(settings, f"position_{name}", None)
            if value is not None:
                position[name] = value
        model = CapeMarianMTModel(CapeMarianConfig(**common, position_embedding=position))
    parameters = {f"model.{name}": value for name, value in state["model"].items()
           if "output_projection" not in name and not name.endswith("version")}  # fmt: skip
    parameters |= {"model.shared.weight": words, "lm_head.weight": words}
    missing, unexpected = model.load_state_dict(parameters, strict=False)
    assert not unexpected, unexpected
    assert all("embed_positions" in name or "final_logits_bias" in name for name in missing)
    model.generation_config.update(pad_token_id=1, bad_words_ids=None, max_length=None)
    model.save_pretrained(folder)
    save_tokenizer(corpus, folder)
    return folder
