"""llama.cpp as a runner: GGUF files on its kernels, under the same engine."""
