"""What ``cape-plugins export`` does with models of Hugging Face, one file per engine."""
