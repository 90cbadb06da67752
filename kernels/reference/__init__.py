"""Every op in plain torch: the truth that the fast backends are tested against."""
