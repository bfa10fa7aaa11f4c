"""Settings, threads, GPUs, drafts and copies that every package of the engine may use. Imports no
other package of the engine.
"""
