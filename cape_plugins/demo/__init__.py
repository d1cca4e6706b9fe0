"""The control experiment: what each type of position embedding does beyond the lengths of training,
on tasks that only positions can solve, in a minute."""
