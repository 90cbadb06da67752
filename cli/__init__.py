"""The `stemma` commands: one file each, assembled in `parser`."""
