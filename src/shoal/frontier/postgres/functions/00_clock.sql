-- The time, and what clients remember of the store.

-- The server's own clock, for people.
CREATE OR REPLACE FUNCTION real_clock(_offset double precision) RETURNS double precision LANGUAGE sql VOLATILE AS $$
    SELECT extract(epoch FROM clock_timestamp())::double precision + _offset
$$;

-- A clock that goes on when the server's is set back, so that nobody waits for an hour that was there already. Somebody
-- notes the time once a second; whoever sees an earlier one adds the difference to the skew. A step back of less than a
-- second may pass unnoticed. Nobody waits for the row: until the skew is committed, the clock stands still for others.
CREATE OR REPLACE FUNCTION clock(_offset double precision) RETURNS double precision LANGUAGE plpgsql AS $$
DECLARE
    _state record;
    _real double precision;
BEGIN
    SELECT c.seen, c.skew INTO _state FROM clock_state c WHERE c.id = 1;
    _real := real_clock(_offset);             -- after the look: so it is later than what was seen
    IF (_real > _state.seen + 1 OR _real < _state.seen - 0.1) AND current_setting('transaction_read_only') = 'off' THEN
        SELECT c.seen, c.skew INTO _state FROM clock_state c WHERE c.id = 1 FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            _real := real_clock(_offset);
            UPDATE clock_state c SET seen = _real, skew = c.skew + greatest(c.seen - _real, 0)
                WHERE c.id = 1 RETURNING c.seen, c.skew INTO _state;
        ELSE
            SELECT c.seen, c.skew INTO _state FROM clock_state c WHERE c.id = 1;
        END IF;
    END IF;
    RETURN greatest(_real, _state.seen) + _state.skew;
END
$$;

CREATE OR REPLACE FUNCTION no_run() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the run is gone' USING ERRCODE = 'SH001';
END
$$;

CREATE OR REPLACE FUNCTION check_run(_run integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM run r WHERE r.id = _run AND NOT r.deleting;
    IF NOT FOUND THEN
        PERFORM no_run();
    END IF;
END
$$;

-- The same; and nobody begins to delete the run until the caller commits.
CREATE OR REPLACE FUNCTION hold_run(_run integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM run r WHERE r.id = _run AND NOT r.deleting FOR SHARE;
    IF NOT FOUND THEN
        PERFORM no_run();
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION rewound(_what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%', _what USING ERRCODE = 'SH004';
END
$$;

-- SH004 unless this request is done under this token, as the client was told. A request that is done stays so, and tokens
-- never repeat: if it is not, the store was rewound.
CREATE OR REPLACE FUNCTION check_receipt(_run integer, _id bigint, _token bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF _id IS NOT NULL THEN
        PERFORM 1 FROM outcome o WHERE o.id = _id AND o.token = _token AND o.state = 3;
        IF NOT FOUND THEN
            PERFORM check_run(_run);
            PERFORM rewound('a completion that was acknowledged is not there');
        END IF;
    END IF;
END
$$;

-- Which of these receipts are still good, counted from 1.
CREATE OR REPLACE FUNCTION surviving_receipts(_ids bigint[], _tokens bigint[])
RETURNS TABLE (nth bigint) LANGUAGE sql AS $$
    SELECT u.nth FROM unnest(_ids, _tokens) WITH ORDINALITY u(id, token, nth)
    CROSS JOIN LATERAL (SELECT o.token, o.state FROM outcome o WHERE o.id = u.id LIMIT 1) o
    WHERE o.token = u.token AND o.state = 3 ORDER BY u.nth
$$;

-- Record a rewind that a client noticed, which knew the store well _known_for seconds ago; and let every host wait one
-- delay from now. Another client of this run may have recorded it since then: then its estimate is only widened.
CREATE OR REPLACE FUNCTION record_rewind(
    _run integer, _offset double precision, _known_for double precision, _lost_seconds double precision
) RETURNS TABLE (at double precision, lost_seconds double precision) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _last record;
BEGIN
    PERFORM 1 FROM host h WHERE h.id = 0 FOR NO KEY UPDATE;  -- one at a time
    PERFORM hold_run(_run);
    _now := clock(_offset);
    -- Also for a client that notices later: what it had in flight ended just now, and the store knows nothing of it.
    UPDATE host h SET ended_at = greatest(h.ended_at, _now) WHERE h.id = 0;
    SELECT r.id, r.noticed INTO _last FROM rewind r WHERE r.run = _run ORDER BY r.run DESC, r.id DESC LIMIT 1;
    IF _last.noticed >= _now - _known_for THEN
        RETURN QUERY
            UPDATE rewind r SET lost_seconds = greatest(r.lost_seconds, _lost_seconds)
                WHERE r.id = _last.id RETURNING r.at, r.lost_seconds;
    ELSE
        RETURN QUERY
            INSERT INTO rewind AS r (run, noticed, at, lost_seconds)
                VALUES (_run, _now, real_clock(_offset), _lost_seconds) RETURNING r.at, r.lost_seconds;
    END IF;
END
$$;

-- The server was restarted, or another one took over, and may have lost its last moments. Nobody can tell when each host was
-- fetched from, so all of them wait one delay from now. Called before anything else is locked.
CREATE OR REPLACE FUNCTION note_restart(_offset double precision) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _boot timestamptz;
BEGIN
    PERFORM 1 FROM host h WHERE h.id = 0 FOR NO KEY UPDATE;
    SELECT c.boot INTO _boot FROM clock_state c WHERE c.id = 1 FOR NO KEY UPDATE;
    IF _boot IS DISTINCT FROM pg_postmaster_start_time() THEN
        UPDATE clock_state c SET boot = pg_postmaster_start_time() WHERE c.id = 1;
        IF _boot IS NOT NULL THEN             -- else nobody has leased yet
            UPDATE host h SET ended_at = greatest(h.ended_at, clock(_offset)) WHERE h.id = 0;
        END IF;
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION rewinds(_run integer)
RETURNS TABLE (at double precision, lost_seconds double precision) LANGUAGE sql AS $$
    SELECT r.at, r.lost_seconds FROM rewind r WHERE r.run = _run ORDER BY r.id
$$;
