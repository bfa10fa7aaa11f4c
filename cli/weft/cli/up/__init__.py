"""`weft up`: a mesh of child processes on one machine."""
