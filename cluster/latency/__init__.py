"""The latency model and its parts: fits, queues, calibration, and the record of its errors. No torch."""
