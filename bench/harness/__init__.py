"""What benchmarks share: workloads, models, machine limits, reports."""
