"""Layer plans, chunk plans, schedules and what runs them."""
