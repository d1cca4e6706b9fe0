"""Pictures of the positions of a model: settings that a checkpoint stores, views, plots and the
command ``cape-plugins plot``. Each module is imported by its own name."""
