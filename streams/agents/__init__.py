"""The four roles as Faust apps: features, online, offline and scoring."""
