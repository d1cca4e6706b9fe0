"""The probe of model families: ``python -m tests.families``."""
