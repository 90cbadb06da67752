"""KV of prompts that one engine computes for another, layer by layer. No torch."""
