-- Write a document if its version is the expected one. ARGV: key, expected version ('' for none), new version, 1 to write or
-- 0 to delete, the value; to create a run with it also the arguments of create_run. Returns 0 if it has another version.

local key, expected, version, writes, value = unpack(arguments_from(5))
local found = call('HGET', PREFIX .. 'document', key)
local stored = found and sub(found, 2, 1 + string.byte(found)) or ''
if stored == version or (writes == '0' and stored == '') then return 1 end
if stored ~= expected then return 0 end
if ARGV[10] then create_run(10) end
if writes == '0' then
  call('ZREM', PREFIX .. 'documents', key)
  call('HDEL', PREFIX .. 'document', key)
else
  call('ZADD', PREFIX .. 'documents', 0, key)
  call('HSET', PREFIX .. 'document', key, string.char(#version) .. version .. value)
end
return 1
