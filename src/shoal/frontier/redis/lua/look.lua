-- What became of requests. ARGV: their fingerprints. Returns of each its record, its parent's, its events and why it is
-- dead; nothing for one that the run does not have.

local fingerprints, answer = arguments_from(5), {}
local records = fetch(own.key .. ':req', fingerprints)
local events = fetch(own.key .. ':event', fingerprints)
local causes = fetch(own.key .. ':dead', fingerprints)
for i in ipairs(fingerprints) do
  local record = records[i]
  if record then
    local parent = #record >= SHORTEST and call('HGET', own.key .. ':req', sub(record, 46, 61))
    answer[i] = {record, parent or '', events[i] or '', causes[i] or ''}
  else
    answer[i] = {}
  end
end
return answer
