"""A family's config reader and its model."""
