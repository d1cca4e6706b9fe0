"""Recordings: reading, log-mel features, batches without padding, subsampling by convolutions, CTC
decoding. Each module is imported by its own name."""
