"""What drafts bring, and what they cost."""
