-- The server's own clock, for times that people read.
CREATE FUNCTION real_clock(_offset double precision) RETURNS double precision LANGUAGE sql VOLATILE AS $$
    SELECT date_part('epoch', clock_timestamp()) + _offset  -- extract() is numeric, and slower
$$;

-- A clock that never goes back, also when the server's clock is set back. Once a second a caller notes the time. A caller
-- that sees an earlier time than the noted one adds the difference to the skew. A step back of less than a second may pass
-- unnoticed. Nobody waits for the row: until the new skew is committed, the clock does not advance for all others.
CREATE FUNCTION clock(_offset double precision) RETURNS double precision LANGUAGE plpgsql AS $$
DECLARE
    _state record;
    _real double precision;
BEGIN
    SELECT c.seen, c.skew INTO _state FROM clock_state c WHERE c.id = 1;
    _real := real_clock(_offset);             -- after the read, so that it is later than `seen`
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
