"""Settings and weight mappings shared by model families."""
