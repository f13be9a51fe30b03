"""How models write tool calls and reasoning: one file per family, which parses and constrains its form."""
