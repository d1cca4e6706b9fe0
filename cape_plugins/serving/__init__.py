"""Serving what was trained without this package: the command ``cape-plugins export``.

At inference all positions are deterministic, so that every engine that adds a table of positions
to its content can serve every type that does. What a host can export is found by its entry points;
the code of this folder imports neither a host nor an engine.
"""
