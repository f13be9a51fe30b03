"""What every part of baton speaks of: requests, errors, drafts, KV layouts, step costs. No torch, no gRPC."""
