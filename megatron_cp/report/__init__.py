"""What one or several runs did, from their run folders alone: read, drawn, and put on one page."""
