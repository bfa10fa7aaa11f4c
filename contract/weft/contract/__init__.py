"""The types that all parts of Weft share: requests, messages, errors, keys, layouts of pages. No
torch.
"""
