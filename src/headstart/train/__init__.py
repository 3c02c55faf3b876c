"""Training drafters: the target writes answers, a student learns to foresee them, and the result is a folder that others load.

A run in order: `data` reads prompts and lets the target answer them, `packing` fills sequences with the answers, a kind
(`eagle3`, `medusa`, `mlp`, `draft`) makes a `student`, `target` teaches it, `losses` and `scores` compare the two. `loop` takes
the steps, tries the student in the engine (`trial`), ends when nothing is gained any more (`stopping`) and keeps checkpoints.
The student is written, and `export` adds its card. `run` puts these together; the command line calls it, and so can anyone.
What differs between kinds stands in their files, all else is said once.
"""
