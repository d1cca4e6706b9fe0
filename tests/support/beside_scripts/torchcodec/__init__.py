"""Stand-in for torchcodec, beside example scripts of transformers: reads waves by soundfile."""
