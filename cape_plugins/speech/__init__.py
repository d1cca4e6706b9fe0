"""Recordings: reading, log-mel features, batches without padding, subsampling by convolutions, CTC
decoding. Import each module by name."""
