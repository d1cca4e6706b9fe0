"""fairseq imports every module in this folder of a user directory; see fairseq_hook."""
