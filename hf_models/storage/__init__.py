"""What folders of models hold: loaded, carrying their own code, stock again."""
