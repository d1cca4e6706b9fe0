"""Images."""

import logging

# It recommends torchvision for speed at each start; these recipes never need it.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "torchvision" not in record.getMessage()
)
