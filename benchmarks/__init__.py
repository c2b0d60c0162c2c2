"""One module a question; `python -m benchmarks.<name>`. Results are recorded in benchmarks/results/."""
