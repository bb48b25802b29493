-- Read a key of the run, or of the store if there is no run. ARGV: the command, the key, the arguments of the command.

return call(ARGV[5], (own and own.key or PREFIX) .. ARGV[6], unpack(arguments_from(7)))
