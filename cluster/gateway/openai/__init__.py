"""OpenAI's HTTP API: schemas of requests, their meaning for the engine, and the format of responses."""
