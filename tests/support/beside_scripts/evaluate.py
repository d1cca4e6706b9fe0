"""Stand-in for evaluate, beside example scripts of transformers: accuracy without the hub."""


class Accuracy:
    """The share of predictions that are right."""

    def compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        return {"accuracy": sum(int(a == b) for a, b in pairs) / len(pairs)}


def load(name, **options):
    assert name == "accuracy", name
    return Accuracy()
