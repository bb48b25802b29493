-- Move the lanes of a host to where they belong after a change. ARGV: its number, numbers of runs.

local number = ARGV[5]
load_hosts({number})
for _, each in ipairs(arguments_from(6)) do
  local run = run_of(tonumber(each))
  if run then touch(run, number, 'stale') end
end
finish()
return 1
