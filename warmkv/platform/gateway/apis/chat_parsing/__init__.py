"""What a model writes, as text, thinking and tool calls: read as transformers' response templates say."""
