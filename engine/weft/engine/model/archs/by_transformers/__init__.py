"""Models that transformers' modelling code computes, with attention over Weft's pages."""
