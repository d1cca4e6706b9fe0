"""``cape-plugins export`` for models of fairseq, one file per engine."""
