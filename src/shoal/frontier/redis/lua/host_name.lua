-- The name of a host. ARGV: its number. Its record may be missing, so it is also searched by its number.

local record = call('HGET', HOSTS, ARGV[5])
if record then return read_host(ARGV[5], record).name end
local cursor, name = '0', ''
repeat
  cursor = scan(PREFIX .. 'name', cursor, 1000, function(each, number)
    if number == ARGV[5] then name = each end
  end)
until cursor == '0' or name ~= ''
return name
