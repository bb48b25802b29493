-- Documents in the order of their keys. ARGV: lowest and highest key as in ZRANGEBYLEX, how many. Returns key, record, ...

local answer = {}
for _, key in ipairs(call('ZRANGEBYLEX', PREFIX .. 'documents', ARGV[5], ARGV[6], 'LIMIT', 0, ARGV[7])) do
  answer[#answer + 1] = key
  answer[#answer + 1] = call('HGET', PREFIX .. 'document', key)
end
return answer
