"""The cost of the router: the real router in front of simulated workers that cost almost nothing."""
