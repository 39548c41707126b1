"""The demo model: its data, tokenizer, training and evaluation. Nothing of the server depends on it."""
