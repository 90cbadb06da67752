"""Images of prompts: bytes to patches, and the token ids that stand for them."""
