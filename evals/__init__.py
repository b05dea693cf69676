"""How a reproduction is judged: reference run, parity, surfaces, statistics, verdict, report."""
