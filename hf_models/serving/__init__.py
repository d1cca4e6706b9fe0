"""``cape-plugins export`` for models of Hugging Face, with one file per engine."""
