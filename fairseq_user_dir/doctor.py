"""What ``cape-plugins doctor`` does for checkpoints of fairseq."""
