"""Engines without a server, side by side. This file and ``protocol`` import only the standard library, for peers."""
