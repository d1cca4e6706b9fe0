import argparse
import sys
import warnings
from collections import defaultdict

import pytest

sys.path.insert(0, ".")
from tests.support.programs import parsers_of
from tests.test_help import PROGRAMS, facts_of

known = defaultdict(dict)
with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for p in PROGRAMS:
        for n, parser in parsers_of(p, patch).items():
            for a in parser._actions:
                for o in a.option_strings:
                    known[o][n] = a
for o, own in sorted(known.items()):
    shown = [a for a in own.values() if a.help != argparse.SUPPRESS]
    if (
        len({n.partition(" ")[0] for n in own}) > 1
        and len({str(facts_of(a)) for a in shown}) > 1
        and not o.startswith("--position-")
    ):
        print("DIFF", o)
