"""What a request asks, as far as routing wants to know: its prompt, as text, as tokens and by its blocks."""
