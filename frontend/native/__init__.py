"""Calls outside of programs, in SGLang's words: `generate`, `encode` and the tokenizer."""
