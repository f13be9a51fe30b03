"""Which tokens a step computes, and what steps cost."""
