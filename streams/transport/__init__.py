"""Columnar Faust transport on librdkafka, and epochs: one Kafka transaction per commit."""
