"""``cape-plugins export`` for models of fairseq, with one file per engine."""
