"""What Headrace runs on: local services, dashboards, alert rules, compose files, decision records."""
