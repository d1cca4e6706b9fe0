"""Pictures of the positions of a model: settings that a checkpoint stores, views, plots and the
command ``cape-plugins plot``. Import each module by name."""
