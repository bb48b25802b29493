-- Holders of leases and roles: workers, and slots of clusters. Fenced ones get nothing more under earlier epochs.

-- FENCED if the slot was fenced with a later epoch. Returns its number; null if it has none yet.
CREATE FUNCTION check_fence(_run integer, _slot text, _epoch bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _number integer;
    _latest bigint;
BEGIN
    SELECT w.number, w.epoch INTO _number, _latest FROM holder w WHERE w.run = _run AND w.name = _slot;
    IF _latest > _epoch THEN
        PERFORM refuse({FENCED}, format(
            'slot %s is now held under epoch %s; epoch %s gets nothing more', _slot, _latest, _epoch));
    END IF;
    RETURN _number;
END
$$;

-- Give a slot a number. The caller has called lock_run().
CREATE FUNCTION add_holder(_run integer, _slot text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _number integer;
BEGIN
    INSERT INTO holder (run, number, name)
        SELECT _run, coalesce(max(w.number), 0) + 1, _slot FROM holder w WHERE w.run = _run
        RETURNING number INTO _number;
    RETURN _number;
END
$$;

-- Revoke leases and roles of a slot under earlier epochs. Returns how many leases; they are lost as if expired.
CREATE FUNCTION fence(_run integer, _offset double precision, _slot text, _epoch bigint)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _number integer;
    _lost record;
BEGIN
    PERFORM lock_run(_run);                   -- before all other locks; nobody leases until the commit
    _number := check_fence(_run, _slot, _epoch);
    PERFORM check_run(_run);
    IF _number IS NULL THEN
        _number := add_holder(_run, _slot);
    END IF;
    UPDATE holder w SET epoch = _epoch WHERE w.run = _run AND w.number = _number AND w.epoch IS DISTINCT FROM _epoch;
    DELETE FROM worker w WHERE w.run = _run AND w.name = _slot AND w.epoch < _epoch;
    UPDATE role r SET token = 0, until = 0 WHERE r.run = _run AND r.slot = _slot AND r.epoch < _epoch AND r.token > 0;
    SELECT array_agg(o.token) AS tokens, array_agg(DISTINCT o.host) AS hosts, array_agg(DISTINCT lane_key(_run, o.host)) AS lanes
        INTO _lost
        FROM (
            SELECT h.token, h.host FROM held h
            WHERE h.run = _run AND h.worker = _number AND h.state = {LEASED} AND h.epoch < _epoch ORDER BY h.token FOR UPDATE
        ) o;
    IF _lost.tokens IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM end_leases(_lost.tokens, _lost.hosts, _lost.lanes, false, true, _offset);
    RETURN cardinality(_lost.tokens);
END
$$;
