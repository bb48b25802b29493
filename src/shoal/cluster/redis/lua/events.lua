-- What has happened, the newest first. ARGV: how many at most. Returns of each when, what, who, which slot or '', its
-- epoch, and more about it.

local answer = {}
for i, event in ipairs(call('XREVRANGE', EVENTS, '+', '-', 'COUNT', ARGV[3])) do
  answer[i] = {}
  for j = 2, #event[2], 2 do answer[i][j / 2] = event[2][j] end
end
return answer
