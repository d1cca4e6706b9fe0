"""Export of trained models to engines that serve them without this package: the command
``cape-plugins export``.

At inference all positions are deterministic, so every engine that adds a table of positions to the
content can serve every type that adds an embedding. Entry points name the exporters for fairseq and
transformers; the modules of this folder import neither a host nor an engine.
"""
