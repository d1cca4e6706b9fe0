"""Commands that the READMEs showed before options had one vocabulary still run."""

import importlib
import shlex

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fairseq")

COMMANDS = """
recipes.mt.run iwslt14_de_en all --sample --position-embedding cape
recipes.mt.run wmt14_en_de all --sample
recipes.mt.run wmt14_en_de prepare --train a.en a.de --train b.en b.de --valid c.en c.de --test d.en d.de
recipes.mt.run wmt14_en_de train select decode score
recipes.mt.run wmt14_en_de train select decode score --position-embedding sinpos
recipes.mt.run wmt14_en_de train select decode score --position-max-global-shift 50 --name cape50
recipes.mt.run multi30k_small prepare --train train.en.gz train.de.gz --test val.en.gz val.de.gz
recipes.mt.run multi30k_small train select --threads 1 --position-embedding cape --name x --seed 100003
recipes.mt.quickstart
recipes.mt.quickstart --seeds 1 2 3 --ablations
recipes.mt.quickstart --data train.en.gz train.de.gz
recipes.mt.quickstart --seeds 1 2 3 --variants sinpos relpos shape shape-sync cape cape-no-alpha cape-unsync --output o
recipes.mt.quickstart --seeds 1 2 3 --variants cape cape-shift5 --jobs 1
recipes.mt.quickstart --variants nopos abspos --jobs 2 --threads 1
recipes.mt.analyze stack --model cape=checkpoint_best.pt --model marian=results/mt_hf/cape --test a.en a.de
recipes.mt.analyze stack --test a.en a.de --model sinpos=a.pt 'cape=runs/cape-seed*/last.pt' marian=hf/cape
recipes.mt.analyze length --model sinpos=a.pt --test a.en a.de --sentences 100 --bins 5 10 --beam 1
recipes.mt.analyze swap --model 'shape=runs/shape-seed*/selected.pt' --test val.en.gz val.de.gz --join 10
recipes.mt.analyze interpolate --text train.en train.de --output joined.en joined.de
recipes.mt.finetune_hf --train-file train.csv --test-file test.csv --model Helsinki-NLP/opus-mt-en-de --position-embedding cape --num_train_epochs 3 --bf16
recipes.mt.finetune_hf --dataset opus_books --dataset-config de-en --source-lang en --target-lang de --position-embedding cape
recipes.vit.finetune_hf --univit --compare abspos cape cape:max_global_scale=1 --seeds 1 2 3
recipes.vit.finetune_hf --dataset FOLDER --model google/vit-base-patch16-224 --position-embedding cape --test-sizes 160 224 384 --learning_rate 1e-4 --num_train_epochs 10 --bf16
recipes.vit.finetune_hf --dataset IMAGENET --preset vit_s --recipe deit --univit --position-embedding cape
recipes.vit.finetune_hf --dataset IMAGENET --preset vit_b --recipe deit --per_device_train_batch_size 64 --bf16 --dataloader_num_workers 8 --compare nopos cape:max_global_scale=1 --test-sizes 160 672
recipes.vit.finetune_hf --dataset FOLDER --recipe cifar10 --compare nopos abspos sinpos cape cape:max_global_scale=1 cape:max_global_shift=0.1 --seeds 1 2 3
recipes.vit.evaluate --model results/cape google/vit-base-patch16-224 --dataset IMAGENET --sizes 160 224 384 --tta --bins --throughput
recipes.vit.evaluate --model results/abspos results/cape --sizes 16 24 32 48 --tta
recipes.vit.evaluate --model cape=s1,s2,s3 google/vit-base --dataset A B --sizes 160 672 --tta --bins --throughput --resume
recipes.vit.evaluate --model results/abspos results/cape --protocol whole
recipes.vit.evaluate --model results/cape --gamma --train-size 24
recipes.phones.run --position-embedding cape --position-max-global-shift 0.2 --models inc
recipes.phones.run --position-embedding shape --position-max-offset 40 --models inc
benchmarks.run training
benchmarks.run --device cuda --dtype bfloat16
benchmarks.run --quick
"""  # noqa: E501

PARSERS = {
    "recipes.mt.run": lambda program, words: program.parse_arguments(words),
    "recipes.mt.quickstart": lambda program, words: program.parse_arguments(words),
    "recipes.mt.analyze": lambda program, words: program.make_parser().parse_args(words),
    "recipes.mt.finetune_hf": lambda program, words: program.read_options(words),
    "recipes.vit.finetune_hf": lambda program, words: program.read_options(words),
    "recipes.vit.evaluate": lambda program, words: program.parse(words),
    "recipes.phones.run": lambda program, words: program.parse_arguments(words),
    "benchmarks.run": lambda program, words: program.parse_arguments(words),
}


@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
def test_earlier_commands_are_understood(command, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: "--device cuda" in command)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    monkeypatch.chdir(tmp_path)
    for name in ("results/abspos", "results/cape"):
        (tmp_path / name).mkdir(parents=True)
    name, *words = shlex.split(command)
    assert PARSERS[name](importlib.import_module(name), words)


@pytest.mark.parametrize("name", PARSERS)
def test_unknown_options_are_refused_or_handed_on(name, capsys):
    """Those of programs that hand none on; fairseq and the Trainer refuse the others."""
    required = {
        "recipes.mt.run": ["wmt14_en_de", "train"],
        "recipes.vit.evaluate": ["--model", "x"],
    }
    words = [*required.get(name, []), "--no-such-option"]
    if name == "recipes.mt.run":
        assert importlib.import_module(name).parse_arguments(words)[1] == ["--no-such-option"]
        return
    with pytest.raises((ValueError, SystemExit)) as error:
        PARSERS[name](importlib.import_module(name), words)
    assert "no-such-option" in f"{error.value} {capsys.readouterr().err}" or name.endswith(
        "analyze"
    )
