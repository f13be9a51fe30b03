"""The prefill role: computes prompts, samples the first token, hands the KV over."""
