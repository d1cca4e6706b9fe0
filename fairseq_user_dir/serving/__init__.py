"""What ``cape-plugins export`` does with models of fairseq, one file per engine."""
