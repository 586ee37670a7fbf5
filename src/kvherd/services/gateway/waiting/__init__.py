"""Who has to wait before anything is sent, for how long, and in which order."""
