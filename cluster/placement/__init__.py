"""Which replica a program runs on: what each is known to have cached, how loaded it is expected to
be, and the policies that weigh the two."""
