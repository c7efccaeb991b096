"""Kafka, Redis and Triton as child processes on loopback, without Docker."""
