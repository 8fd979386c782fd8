"""Read run folders, draw them, and write them on one page."""
