"""What ``latency_model`` is made of: fits, queues, calibration, and the books of its own error. No torch."""
