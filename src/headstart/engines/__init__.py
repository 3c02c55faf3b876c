"""The others: what runs elsewhere, measured and driven as our own engine is."""
