"""Export of trained models to engines that serve them without this package: the command
``cape-plugins export``.

At inference all positions are deterministic, so every engine that adds a table of positions to the
content can serve every type that adds an embedding. Entry points name the exporters of each host;
the code of this folder imports neither a host nor an engine.
"""
