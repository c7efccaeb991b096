"""Apache Kafka as a child process: its jars, its Java, its broker."""
