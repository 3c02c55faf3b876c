"""Advice before anything is loaded: what is here, what works together, what fits."""
