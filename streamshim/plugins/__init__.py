"""Entry points for engines and pytest. Each imports its host from inside functions, and nothing heavy on import."""
