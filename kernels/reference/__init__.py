"""Every op in plain torch: the ground truth for tests of the fast backends."""
