"""Types that all packages share: requests, errors, drafts, KV layouts, step costs. No torch, no gRPC."""
