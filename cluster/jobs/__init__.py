"""Jobs: files of requests that run in spare capacity and survive the loss of routers, workers and machines."""
