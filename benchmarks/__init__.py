"""The cost of positions, as ratios against stock fairseq. Not part of the installed package."""
