"""What runs, in which order: recipes, stages, Prefect flows, and the `repro` command."""
