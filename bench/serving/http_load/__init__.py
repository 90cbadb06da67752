"""`stemma bench load`: many streams at a time, and what HTTP adds to one request."""
