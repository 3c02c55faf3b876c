"""Triton kernels: products, attention, and the choice of tokens. Tensors in, tensors out; nothing here knows a model.

Every kernel computes a row from that row's own data, in an order that does not depend on how many rows share the launch,
as long as its tile stays the same. That is what `deterministic` builds on.
"""
