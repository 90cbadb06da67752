"""Fast CPU versions, made of few large torch calls: on small models the call is the cost."""
