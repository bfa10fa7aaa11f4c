"""Reads the files of models and adapters: configurations, names, digests. No torch.

Readers raise ModelError, and those of adapters AdapterError, for a file that is missing or
malformed or asks for what is not supported. The message names the file and the field.
"""
