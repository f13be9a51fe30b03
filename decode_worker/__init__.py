"""The decode role: takes KV over and generates, several tokens a step where speculation helps."""
