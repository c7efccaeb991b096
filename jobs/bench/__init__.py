"""Benchmarks: ratios measured in one run, interleaved, on results that have been checked."""
