"""What a request asks of tool calls and reasoning, and its output read as a message."""
