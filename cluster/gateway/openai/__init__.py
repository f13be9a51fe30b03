"""OpenAI's HTTP API: what requests may say, what they mean for the engine, and what responses look like."""
