"""OpenAI's Files and Batches over HTTP."""
