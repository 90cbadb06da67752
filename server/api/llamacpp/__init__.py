"""llama.cpp's own endpoints: completions, infilling, and what its clients ask of a server."""
