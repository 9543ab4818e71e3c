"""What a run directory says about its run: read, counted, drawn, and put on one page."""
