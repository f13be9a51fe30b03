"""What the router costs: the real one in front of workers that cost nothing."""
