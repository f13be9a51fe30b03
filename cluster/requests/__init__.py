"""Requests in the router: what the gateway asks for, the record of each request, and its observers."""
