"""Reading features online: through a cache, single flights, a circuit breaker and explicit fallbacks."""
