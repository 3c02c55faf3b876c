"""Training drafters: the target writes answers, a head learns to foresee them, and the result is a folder that others load too.

A run in order: `data` reads prompts and lets the target answer them, `packing` fills sequences with the answers, `eagle3`
says what a step computes (on `chains`, `losses` and `target`), `loop` takes the steps, tries the head in the engine (`trial`),
ends when nothing is gained any more (`stopping`) and keeps checkpoints, `export` writes the head and its card. `run` puts
these together; the command line calls it, and so can anyone.
"""
