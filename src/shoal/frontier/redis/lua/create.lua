-- Create a run. ARGV: see create_run. Returns 0 if it exists.

return create_run(5)
