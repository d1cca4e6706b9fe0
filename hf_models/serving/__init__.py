"""``cape-plugins export`` for models of Hugging Face, one file per engine."""
