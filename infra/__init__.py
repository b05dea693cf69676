"""Where a run executes and where its files lie. Imports nothing else of ours."""
