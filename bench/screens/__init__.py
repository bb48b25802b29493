"""A large store, and what the screens of the dashboard cost with it, for `bench/dashboard`."""
