-- Pages with so many links that they would keep others waiting: their links come in chunks, before, and enter the queue in
-- chunks, after.

-- Keep a chunk until its lease ends. False when that was lost. The same chunk again takes the place of the first.
CREATE OR REPLACE FUNCTION upload(
    _run integer, _token bigint, _parent bytea, _number integer,
    _hosts text[], _fingerprint bytea[], _host integer[], _rank double precision[], _payload bytea[]
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM check_run(_run);
    PERFORM 1 FROM held h WHERE h.token = _token AND h.run = _run AND h.fingerprint = _parent AND h.state = 2
        FOR SHARE;                            -- whoever ends the lease finds the chunk
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF _number = 0 THEN  -- what others uploaded for a lease that ended in another way
        DELETE FROM chunk c WHERE c.run = _run
            AND NOT EXISTS (SELECT FROM held h WHERE h.token = c.token AND h.state = 2)
            AND NOT EXISTS (SELECT FROM stage s WHERE s.token = c.token);
    END IF;
    INSERT INTO chunk AS c (token, number, run, size, hosts, fingerprints, host, ranks, payloads)
        VALUES (_token, _number, _run, cardinality(_fingerprint), _hosts, _fingerprint, _host, _rank, _payload)
        ON CONFLICT (token, number) DO UPDATE SET size = excluded.size, hosts = excluded.hosts,
            fingerprints = excluded.fingerprints, host = excluded.host, ranks = excluded.ranks,
            payloads = excluded.payloads;
    RETURN true;
END
$$;

-- Some leases end: what was uploaded for those that are done or dead is registered, all else is removed. Returns how many
-- links are incoming. SH004 if some of it is missing though the lease is good: the store was rewound since the upload.
CREATE OR REPLACE FUNCTION register_stages(
    _run integer, _token bigint[], _states integer[], _ids bigint[], _chunks integer[], _staged integer[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    _each record;
    _found bigint;
    _incoming bigint := 0;
BEGIN
    DELETE FROM chunk c USING unnest(_token, _states, _chunks) u(token, state, chunks)
        WHERE c.token = u.token AND u.state IN (1, 3, 4) AND c.number >= CASE u.state WHEN 1 THEN 0 ELSE u.chunks END;
    FOR _each IN
        SELECT * FROM unnest(_token, _states, _ids, _staged) u(token, state, id, staged)
        WHERE u.staged > 0 AND u.state IN (3, 4)
    LOOP
        SELECT sum(c.size) INTO _found FROM chunk c WHERE c.token = _each.token;
        IF _found IS DISTINCT FROM _each.staged THEN
            PERFORM rewound('links that were uploaded are not there');
        END IF;
        INSERT INTO stage (token, run, parent, remaining) VALUES (_each.token, _run, _each.id, _each.staged);
        _incoming := _incoming + _each.staged;
    END LOOP;
    RETURN _incoming;
END
$$;

-- Move a chunk of a registered stage into the queue: of this token's, or of any if it is null. A chunk that somebody else
-- moves at this moment is passed over. Returns how many links that stage still has and how many were new so far; no row
-- when there was nothing to move.
CREATE OR REPLACE FUNCTION move_chunk(_run integer, _offset double precision, _token bigint)
RETURNS TABLE (remaining integer, added integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _chunk record;
    _new record;
    _added integer;
BEGIN
    SELECT c.*, s.parent INTO _chunk
        FROM stage s CROSS JOIN LATERAL (
            SELECT c.* FROM chunk c WHERE c.token = s.token ORDER BY c.token, c.number LIMIT 1 FOR UPDATE SKIP LOCKED
        ) c
        WHERE s.run = _run AND s.remaining > 0 AND (_token IS NULL OR s.token = _token)
        ORDER BY s.run, s.token LIMIT 1;
    IF FOUND THEN
        SELECT * INTO _new FROM enqueue(
            _run, real_clock(_offset), _chunk.hosts, ARRAY[_chunk.parent], array_fill(1, ARRAY[_chunk.size]),
            _chunk.fingerprints, _chunk.host, _chunk.ranks, _chunk.payloads);
        _added := coalesce(cardinality(_new.ids), 0);
        IF _added > 0 THEN
            PERFORM lock_lanes(_new.lanes);
            PERFORM fill_lanes(_new.lanes, _new.ranks, _new.ids);
        END IF;
        DELETE FROM chunk c WHERE c.token = _chunk.token AND c.number = _chunk.number;
        UPDATE stage s SET remaining = s.remaining - _chunk.size, added = s.added + _added
            WHERE s.token = _chunk.token;
        UPDATE ledger g SET pushed = g.pushed + _added, ready = g.ready + _added,
            duplicates = g.duplicates + _chunk.size - _added, incoming = g.incoming - _chunk.size
            WHERE g.run = _run;
        IF NOT FOUND THEN
            PERFORM no_run();
        END IF;
        _token := _chunk.token;
    END IF;
    RETURN QUERY SELECT s.remaining, s.added FROM stage s WHERE s.token = _token;
END
$$;
