-- Events, newest first. ARGV: the limit. Returns for each: time, what, member, slot or '', epoch, detail.

local answer = {}
for i, event in ipairs(call('XREVRANGE', EVENTS, '+', '-', 'COUNT', ARGV[3])) do
  answer[i] = {}
  for j = 2, #event[2], 2 do answer[i][j / 2] = event[2][j] end
end
return answer
