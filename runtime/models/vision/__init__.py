"""Vision towers: images to features that take the places of a decoder's tokens."""
