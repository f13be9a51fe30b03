"""Where a request's time went, and what to blame for it. No torch."""
