"""`weft top`: the live state of a mesh in a terminal."""
