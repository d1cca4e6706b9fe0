"""Translators of the hosts, and of the engines that `cape-plugins export` writes for. Each file
holds one translator and imports no other file, so that each can be measured in a separate process.
"""
