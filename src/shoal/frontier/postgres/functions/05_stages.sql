-- Links of very large pages. They are uploaded in chunks before the completion, and enter the queue in chunks after it, so
-- that no call blocks others for long.

-- Store a chunk until its lease ends, or replace it. False if the lease was lost.
CREATE FUNCTION upload(
    _run integer, _token bigint, _parent bytea, _number integer,
    _hosts text[], _fingerprint bytea[], _host integer[], _rank double precision[], _url text[], _payload bytea[]
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM check_run(_run);
    PERFORM 1 FROM held h WHERE h.token = _token AND h.run = _run AND h.fingerprint = _parent AND h.state = {LEASED}
        FOR SHARE;                            -- the call that ends the lease sees the chunk
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF _number = 0 THEN  -- delete chunks of leases that ended without a completion
        DELETE FROM chunk c WHERE c.run = _run
            AND NOT EXISTS (SELECT FROM held h WHERE h.token = c.token AND h.state = {LEASED})
            AND NOT EXISTS (SELECT FROM stage s WHERE s.token = c.token);
    END IF;
    INSERT INTO chunk AS c (token, number, run, size, hosts, fingerprints, host, ranks, urls, payloads)
        VALUES (_token, _number, _run, cardinality(_fingerprint), _hosts, _fingerprint, _host, _rank, _url, _payload)
        ON CONFLICT (token, number) DO UPDATE SET size = excluded.size, hosts = excluded.hosts,
            fingerprints = excluded.fingerprints, host = excluded.host, ranks = excluded.ranks,
            urls = excluded.urls, payloads = excluded.payloads;
    RETURN true;
END
$$;

-- Register the chunks of leases that end done or dead, and delete all others. Returns the number of registered links.
-- REWOUND if a chunk is missing though the lease is valid: the store was rewound since the upload.
CREATE FUNCTION register_stages(
    _run integer, _token bigint[], _states integer[], _ids bigint[], _chunks integer[], _staged integer[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    _each record;
    _found bigint;
    _incoming bigint := 0;
BEGIN
    DELETE FROM chunk c USING unnest(_token, _states, _chunks) u(token, state, chunks)
        WHERE c.token = u.token AND u.state IN ({WAITING}, {DONE}, {DEAD})
            AND c.number >= CASE u.state WHEN {WAITING} THEN 0 ELSE u.chunks END;
    FOR _each IN
        SELECT * FROM unnest(_token, _states, _ids, _staged) u(token, state, id, staged)
        WHERE u.staged > 0 AND u.state IN ({DONE}, {DEAD})
    LOOP
        SELECT sum(c.size) INTO _found FROM chunk c WHERE c.token = _each.token;
        IF _found IS DISTINCT FROM _each.staged THEN
            PERFORM refuse({REWOUND}, 'uploaded links are missing');
        END IF;
        INSERT INTO stage (token, run, parent, remaining) VALUES (_each.token, _run, _each.id, _each.staged);
        _incoming := _incoming + _each.staged;
    END LOOP;
    RETURN _incoming;
END
$$;

-- Move a chunk of this token's stage into the queue, or of any stage if it is null. Skips a chunk that another client is
-- moving. Returns how many links the stage still has, and how many were queued and refused so far; no row if there was
-- nothing to move.
CREATE FUNCTION move_chunk(_run integer, _offset double precision, _token bigint)
RETURNS TABLE (remaining integer, added integer, refused integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _limit bigint := (SELECT r.link_limit FROM run r WHERE r.id = _run);
    _room bigint := room_for_links(_run, _limit);
    _chunk record;
    _new record;
    _added integer;
    _refused integer;
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
            _chunk.fingerprints, _chunk.host, _chunk.ranks, _chunk.urls, _chunk.payloads, _room, _limit, '{}');
        _added := coalesce(cardinality(_new.ids), 0);
        _refused := coalesce(cardinality(_new.refused), 0);
        IF _added > 0 THEN
            PERFORM fill_lanes(_new.lanes, _new.ranks, _new.ids);
        END IF;
        DELETE FROM chunk c WHERE c.token = _chunk.token AND c.number = _chunk.number;
        UPDATE stage s SET remaining = s.remaining - _chunk.size, added = s.added + _added, refused = s.refused + _refused
            WHERE s.token = _chunk.token;
        UPDATE ledger g SET pushed = g.pushed + _added + _refused, ready = g.ready + _added, dead = g.dead + _refused,
            duplicates = g.duplicates + _chunk.size - _added - _refused, incoming = g.incoming - _chunk.size
            WHERE g.run = _run;
        IF NOT FOUND THEN
            PERFORM refuse({NO_RUN}, 'the run was deleted');
        END IF;
        _token := _chunk.token;
    END IF;
    RETURN QUERY SELECT s.remaining, s.added, s.refused FROM stage s WHERE s.token = _token;
END
$$;
