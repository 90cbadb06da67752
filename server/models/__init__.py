"""Several models behind one address: each has its engine, which is loaded when it is asked for."""
