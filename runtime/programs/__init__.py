"""Programs at run time: their branches, calls and transcripts."""
