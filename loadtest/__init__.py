"""Load generator and comparer: a black box that speaks HTTP to any OpenAI-compatible server."""
