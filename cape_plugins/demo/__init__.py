"""The control experiment: shows in a minute what each type of position embedding does beyond the
lengths of training, on tasks that only positions can solve."""
