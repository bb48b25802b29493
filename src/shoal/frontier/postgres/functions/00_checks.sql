-- Checks at the start of a call, and rewinds of the store.

-- Raise an error with one of the codes in shoal/clients/postgres.py.
CREATE FUNCTION refuse(_code text, _what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%', _what USING ERRCODE = _code;
END
$$;

CREATE FUNCTION check_run(_run integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM run r WHERE r.id = _run AND NOT r.deleting;
    IF NOT FOUND THEN
        PERFORM refuse({NO_RUN}, 'the run was deleted');
    END IF;
END
$$;

-- The same. Nobody can delete the run until the caller commits.
CREATE FUNCTION hold_run(_run integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM run r WHERE r.id = _run AND NOT r.deleting FOR SHARE;
    IF NOT FOUND THEN
        PERFORM refuse({NO_RUN}, 'the run was deleted');
    END IF;
END
$$;

-- REWOUND unless this request is done under this token, as the store acknowledged to the client. A done request stays done,
-- and tokens never repeat: otherwise the store was rewound.
CREATE FUNCTION check_receipt(_run integer, _id bigint, _token bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF _id IS NOT NULL THEN
        PERFORM 1 FROM outcome o WHERE o.id = _id AND o.token = _token AND o.state = {DONE};
        IF NOT FOUND THEN
            PERFORM check_run(_run);
            PERFORM refuse({REWOUND}, 'a completion that it had acknowledged is missing');
        END IF;
    END IF;
END
$$;

-- Record a rewind that a client noticed. _age: seconds since the newest lost change was acknowledged; null: not known. The
-- receipts come newest first, each with its age when the rewind was noticed: the first that is still valid tells how many
-- seconds were lost at most. If another client of this run has recorded the rewind already, its estimate is only widened.
CREATE FUNCTION record_rewind(
    _run integer, _offset double precision, _age double precision,
    _ages double precision[], _ids bigint[], _tokens bigint[]
) RETURNS TABLE (at double precision, lost_seconds double precision) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _last record;
    _lost double precision;
BEGIN
    PERFORM wait_one_delay(_offset);
    PERFORM hold_run(_run);
    _now := clock(_offset);
    SELECT u.age INTO _lost FROM unnest(_ages, _ids, _tokens) WITH ORDINALITY u(age, id, token, nth)
        CROSS JOIN LATERAL (SELECT o.token, o.state FROM outcome o WHERE o.id = u.id LIMIT 1) o
        WHERE o.token = u.token AND o.state = {DONE} ORDER BY u.nth LIMIT 1;
    SELECT r.id, r.noticed INTO _last FROM rewind r WHERE r.run = _run ORDER BY r.run DESC, r.id DESC LIMIT 1;
    IF _last.noticed >= _now - _age THEN
        RETURN QUERY
            UPDATE rewind r SET lost_seconds = greatest(r.lost_seconds, _lost)
                WHERE r.id = _last.id RETURNING r.at, r.lost_seconds;
    ELSE
        RETURN QUERY
            INSERT INTO rewind AS r (run, noticed, at, lost_seconds)
                VALUES (_run, _now, real_clock(_offset), _lost) RETURNING r.at, r.lost_seconds;
        INSERT INTO inventory (run, kind, name) SELECT _run, 'rewind', max(r.id)::text FROM rewind r WHERE r.run = _run
            ON CONFLICT DO NOTHING;
    END IF;
END
$$;

-- Let every host wait one delay from now: the store lost changes, so nobody knows when a host was last contacted, or what
-- is in flight. Locks host 0 first, so one caller at a time.
CREATE FUNCTION wait_one_delay(_offset double precision) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM host h WHERE h.id = 0 FOR NO KEY UPDATE;
    UPDATE host h SET ended_at = greatest(h.ended_at, clock(_offset)) WHERE h.id = 0;
END
$$;

-- After a restart or failover the server may have lost its last changes. Called before any other lock is taken.
CREATE FUNCTION note_restart(_offset double precision) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _boot timestamptz;
BEGIN
    PERFORM 1 FROM host h WHERE h.id = 0 FOR NO KEY UPDATE;
    SELECT c.boot INTO _boot FROM clock_state c WHERE c.id = 1 FOR NO KEY UPDATE;
    IF _boot IS DISTINCT FROM pg_postmaster_start_time() THEN
        UPDATE clock_state c SET boot = pg_postmaster_start_time() WHERE c.id = 1;
        IF _boot IS NOT NULL THEN             -- else nobody has leased yet
            PERFORM wait_one_delay(_offset);
        END IF;
    END IF;
END
$$;

CREATE FUNCTION rewinds(_run integer)
RETURNS TABLE (at double precision, lost_seconds double precision) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT r.at, r.lost_seconds FROM rewind r WHERE r.run = _run ORDER BY r.id
$$;
