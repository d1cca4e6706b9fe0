"""Stand-in for torchvision, beside example scripts of transformers: images have their size."""
