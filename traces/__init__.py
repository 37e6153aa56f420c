"""Request traces (who arrives when, how many tokens) and routing traces (which experts are activated)."""
