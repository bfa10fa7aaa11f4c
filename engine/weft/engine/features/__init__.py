"""Guests: capabilities that the loop knows by ports alone. Only `loop.build` imports them."""
