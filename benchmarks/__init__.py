"""What streamshim costs: ``make bench``, or ``python -m benchmarks --help``."""
