"""Translators of the hosts, and of the engines that `cape-plugins export` writes for; a file each,
which imports none of the others, so that each can be measured in a separate process."""
