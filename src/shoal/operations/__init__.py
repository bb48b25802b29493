"""What people do to runs and see of them: the same functions for commands, API and dashboard.

`snapshot`, `processes` and `problems` say how runs are; `schedules` start them, `notifications` report problems,
`metrics` are for Prometheus. This room may import `runs` and what is below it, and prints nothing. Start with
`snapshot`.
"""
