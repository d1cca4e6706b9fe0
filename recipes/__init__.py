"""Training recipes: data preparation, training, evaluation. Not part of the installed package."""
