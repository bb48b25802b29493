"""The screens of the dashboard, one module each."""
