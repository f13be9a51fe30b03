"""Messages and stubs generated from ``proto/``. Change the schemas there, then run ``make proto``."""
