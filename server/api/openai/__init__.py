"""OpenAI's endpoints: fields in, wording out."""
