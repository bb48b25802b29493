-- The item log. ARGV: the first number, and how many to return at most; or 'trim', through which number to forget.

local key = own.key .. ':items'
if ARGV[5] == 'trim' then return call('XTRIM', key, 'MINID', '=', ARGV[6]) end
return call('XRANGE', key, ARGV[5], '+', 'COUNT', ARGV[6])
