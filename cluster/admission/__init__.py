"""Which requests go, wait, or are refused: by what their route would take. See ``docs/admission.md``."""
