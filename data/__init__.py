"""Documents -> tokens -> instances -> order -> batches, and the receipt that proves it. Imports infra only."""
