"""Pictures of the positions of a model, and the command ``cape-plugins plot``. Import each module
by name."""
