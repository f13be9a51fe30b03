"""Engines without a server, side by side. This file and ``protocol`` import nothing: peers load them, too."""
