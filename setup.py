"""Metadata of the package; the settings of the tools are in pyproject.toml."""

import json
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

PACKAGES = ("cape_plugins", "fairseq_user_dir", "hf_models")

# The extra [fairseq] holds what fairseq-fixed 0.12.3.1 imports, not fairseq-fixed itself:
#   pip install "cape-plugins[fairseq]"
#   pip install --no-build-isolation --no-deps fairseq-fixed==0.12.3.1
# It declares torchaudio as a dependency. Nothing here needs it, it has no build for a CPU-only
# torch, and one that does not match the installed torch makes fairseq's audio modules fail with
# OSError. pip cannot leave out one dependency of a dependency, so the second line is needed.
# It compiles against the installed Cython and numpy, hence --no-build-isolation; it has been tried
# up to Python 3.12, for which flashlight-text has its last wheels as well.
UP_TO_3_12 = ' ; python_version < "3.13"'
FAIRSEQ = [
    "bitarray",
    "cffi",
    "cython",
    "hydra-core==1.3.2",
    "numpy",
    "omegaconf==2.3.0",
    "packaging",
    "PyYAML>=5.4",  # older ones run code from config.yaml, as fairseq reads it
    "regex",
    "sacrebleu>=2.0",
    "scikit-learn",
    "setuptools<81",
    "tqdm",
    "wheel",
]
FAIRSEQ = [requirement + UP_TO_3_12 for requirement in FAIRSEQ]
PLOT = ["matplotlib>=3.8"]
SPEECH = ["flashlight-text" + UP_TO_3_12, "jiwer", "scipy", "sentencepiece", "soundfile"]
# Exactly the minor releases that the tests have passed on: see `make test-versions`.
TESTED = json.loads((ROOT / "hf_models" / "tested.json").read_text(encoding="utf-8"))
OLDEST, NEWEST = TESTED[0]["transformers"], TESTED[-1]["transformers"]
MAJOR, MINOR = map(int, NEWEST.split(".")[:2])
TRANSFORMERS = f"transformers>={OLDEST},<{MAJOR}.{MINOR + 1}"
HF = ["accelerate", "datasets", "safetensors", "sentencepiece", TRANSFORMERS]
SERVE = ["ctranslate2>=4.6", "onnx>=1.18", "onnxruntime>=1.22", "onnxscript>=0.5"]
RECIPES = [
    *PLOT,
    *SPEECH,
    "espeakng-loader",
    "num2words",
    "sacrebleu>=2.0",
    "sacremoses",
    "scikit-learn",
    "subword-nmt",
    "tqdm",
]
DEV = ["build", "pytest>=8", "pytest-xdist", "ruff", "setuptools<81", "wheel"]

setup(
    name="cape-plugins",
    version="0.2.0",
    description=(
        "Continuous (CAPE) and shifted (SHAPE) position embeddings for fairseq, "
        "Hugging Face and plain torch models, by one flag"
    ),
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="cape-plugins authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords="position embedding, CAPE, SHAPE, transformer, fairseq, translation, speech",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    # recipes, benchmarks and tests are programs of this repository, not packages of the wheel
    packages=find_packages(include=[f"{name}{end}" for name in PACKAGES for end in ("", ".*")]),
    package_data={
        "": ["*.md"],  # templates of READMEs of exported folders
        "cape_plugins": ["py.typed"],
        "hf_models": ["not_proved.json", "tested.json"],
    },
    install_requires=["numpy", "torch>=2.6"],
    extras_require={
        "fairseq": FAIRSEQ,
        "hf": HF,
        "plot": PLOT,
        "speech": SPEECH,
        "recipes": RECIPES,
        "serve": SERVE,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": [
            "cape-plugins = cape_plugins.cli:main",
            "cape-average-checkpoints = fairseq_user_dir.average:main",
        ],
        # what a host does for `cape-plugins alpha` and `cape-plugins advise`
        "cape_plugins.alpha": [
            "tokenizer = hf_models.counting:count_texts",
            "tokens = hf_models.counting:token_lists",
        ],
        # and for `cape-plugins export`, named HOST-ENGINE
        "cape_plugins.export": [
            "fairseq-ctranslate2 = fairseq_user_dir.serving.ctranslate2:export",
            "fairseq-stock = fairseq_user_dir.serving.stock_checkpoint:export",
            "hugging_face-ctranslate2 = hf_models.serving.ctranslate2:export",
            "hugging_face-ggml = hf_models.serving.ggml:export",
            "hugging_face-onnx = hf_models.serving.onnx:export",
            "hugging_face-stock = hf_models.serving.stock_folder:export",
        ],
        # and for `cape-plugins doctor`, named after the host
        "cape_plugins.doctor": [
            "fairseq = fairseq_user_dir.doctor:doctor",
            "hugging_face = hf_models.doctor:doctor",
        ],
    },
    zip_safe=False,
)
