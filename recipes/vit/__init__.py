"""Images."""

import logging

# transformers recommends torchvision for speed at each start; these recipes never need torchvision.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "torchvision" not in record.getMessage()
)
