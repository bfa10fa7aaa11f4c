"""Constrained output: grammars compiled apart from the engine, masks made beside the forward."""
