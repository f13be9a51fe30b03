"""The latency model: fits, queues, calibration and prediction errors. No torch."""
