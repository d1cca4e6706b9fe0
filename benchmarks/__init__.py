"""What positions cost, as ratios against stock fairseq. Not part of the installed package."""
