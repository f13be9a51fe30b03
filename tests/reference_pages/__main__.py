"""Writes the generated pages of docs/reference: ``python -m tests.reference_pages``."""

from __future__ import annotations

from tests.reference_pages.pages import FOLDER, PAGES


def main() -> None:
    for name, render in PAGES.items():
        (FOLDER / name).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
