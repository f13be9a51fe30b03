"""Hostile messages to workers: mutations of valid ones, from peers with and without the cluster's secret."""
