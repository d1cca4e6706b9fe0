"""The parsers of the programs of the repository, without running them."""

import argparse
import runpy
import sys


def module_of(path):
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__main__")


class Captured(BaseException):
    """The parser of a program, at the time when it would read its arguments."""


def parsers_of(path, monkeypatch):
    """``{name: parser}`` of a program and of its subcommands; none of one without options."""

    def capture(parser, *args, **more):
        raise Captured(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        patch.setattr(sys, "argv", [path])
        try:
            runpy.run_module(module_of(path), run_name="__main__", alter_sys=True)
        except Captured as caught:
            return dict(below(module_of(path), caught.args[0]))
        except SystemExit:
            return {}


def below(name, parser):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from below(f"{name} {word}", inner)
