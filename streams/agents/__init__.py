"""The roles that read topics, as Faust apps: features, online, offline and scoring."""
