"""Recipe for images."""

import logging

# Silences the advice of transformers, at each start, to install torchvision for speed: these
# recipes do not use torchvision.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "torchvision" not in record.getMessage()
)
