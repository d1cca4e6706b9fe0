"""A control experiment, which takes minutes: the errors of each type of position embedding on
inputs longer than in training, for tasks that can be solved by positions alone."""
