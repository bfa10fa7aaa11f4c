"""What all parts of Weft agree on: requests, messages, errors, keys, layouts of pages. No torch."""
