"""Traffic against policies without a model: the engine's step on a clock that only counts.

What a forward and a drafter take is given (`machines`), and what drafters would have said is in the trace (`answers`), so that
every policy hears the same answers. Drafters without weights are run for real where the tokens are known.
"""
