"""One command that checks and measures baton on a GPU machine, and keeps its report whatever breaks."""
