"""A model as the engine sees it: loading, tokenizer, attention over the KV pool, runners."""
